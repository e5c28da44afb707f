import pathlib
def at(file, mark):
    for n, t in enumerate(pathlib.Path(__file__).with_name(file + ".py").read_text().splitlines(), 1):
        if t.endswith("# mark: " + mark): return f"{file}.py:{n}"
E_ = [
 ("vit_accumulated", ["tf32"]), ("vit_accumulated", ["autocast:bf16"]),
 ("gnn_metrics", ["no-wait:" + at("gnn_metrics", "wait")]), ("gnn_metrics", ["optimizer:fused"]),
 ("text_loader", ["workers:4"]), ("text_loader", ["autocast:bf16"]),
 ("timm_convnet", ["channels-last"]), ("timm_convnet", ["optimizer:foreach"]),
 ("gpt2_checkpointed", ["no-checkpoint:transformer.h.*"]), ("gpt2_checkpointed", ["optimizer:fused"]),
 ("q_learning", ["no-host:" + at("q_learning", "host")]), ("q_learning", ["no-host:" + at("q_learning", "host"), "no-wait:" + at("q_learning", "wait")]),
]
