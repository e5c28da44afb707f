"""The only place that draws or formats: tables, JSON, plots, HTML."""
