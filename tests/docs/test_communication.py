"""In a step only the `Backend` calls `torch.distributed`; others do at set-up or after errors."""

import ast

from tests.docs.test_layers import FILES, PACKAGE

BACKEND = ("runtime/backend/base.py", "runtime/backend/gloo.py")
# What the others call, and when.
OUTSIDE_OF_STEPS = {
    "profile/doctor_checks.py": {"all_reduce"},  # a check of the host
    "profile/link_probes.py": {"broadcast"},  # a probe
    "profile/measure.py": {"all_gather_object", "broadcast_object_list"},  # a probe
    "profile/timing.py": {"all_gather_object", "all_reduce", "barrier", "broadcast"},  # a probe
    "runtime/async_pipeline/runner.py": {"all_gather_object"},  # set-up
    "runtime/comm/channel_groups.py": {"all_gather_object"},  # set-up
    "runtime/comm/equal_ranks.py": {"all_gather_object"},  # the first batch of a form
    "runtime/comm/first_error.py": {"broadcast_object_list"},  # set-up
    "runtime/executor/failures.py": {"all_gather_object"},  # after an error
    "runtime/model_values.py": {"all_gather_object"},  # set-up
    "runtime/parameters/clipping.py": {"all_gather_object"},  # set-up
    "runtime/parameters/nan_origin.py": {"all_gather_object"},  # after an error
    "runtime/pipeline/stage_links.py": {"barrier"},  # set-up
    "runtime/verify/worker.py": {"all_gather_object", "barrier"},  # a comparison
    "runtime/weight_files/saving.py": {"all_gather_object", "gather_object"},  # saving
    "train/checkpoint/checkpoint.py": {
        "all_gather_object",
        "broadcast_object_list",
    },  # saving and resuming
    "train/checkpoint/export.py": {"all_gather_object", "broadcast"},  # saving
    "train/checkpoint/state.py": {"gather_object"},  # resuming
    "train/coordination/consensus.py": {"all_gather_object"},  # set-up, and after an error
    "train/routing.py": {"all_reduce"},  # the end of a run
}
# What sends nothing.
QUIET = (
    *("group", "get_rank", "get_world_size", "get_backend", "get_backend_config", "ReduceOp"),
    *(
        "is_initialized",
        "is_available",
        "is_gloo_available",
        "is_nccl_available",
        "get_group_rank",
        "ProcessGroup",
        "Work",
        "DistError",
    ),
    *("get_process_group_ranks", "get_global_rank", "DistNetworkError", "DistStoreError"),
    *("init_process_group", "destroy_process_group", "new_group", "new_subgroups_by_enumeration"),
    *("Store", "TCPStore", "FileStore", "PrefixStore", "HashStore", "default_pg_timeout"),
)


def used(tree):
    """Names of `torch.distributed` that a file uses."""
    module = {"torch.distributed"}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            module |= {one.asname for one in node.names if one.name == "torch.distributed"}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            module |= {one.asname or one.name for one in node.names if one.name == "distributed"}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch.distributed":
            found |= {one.name for one in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in module:
            found.add(node.attr)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "getattr"
            and ast.unparse(node.args[0]) in module
        ):
            found.add(ast.literal_eval(node.args[1]))
    return found


def test_only_the_backend_communicates_in_a_step():
    calls = {
        str(file.relative_to(PACKAGE)): used(ast.parse(file.read_text())).difference(QUIET)
        for file in FILES
    }
    assert all(calls.pop(file) for file in BACKEND)
    assert {file: names for file, names in calls.items() if names} == OUTSIDE_OF_STEPS


def test_uses_of_torch_distributed_are_found():
    for text in (
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "import torch\ntorch.distributed.all_reduce(x)",
        "from torch import distributed\ndistributed.all_reduce(x)",
        "from torch.distributed import all_reduce",
        "import torch.distributed as dist\ngetattr(dist, 'all_reduce')(x)",
    ):
        assert used(ast.parse(text)) == {"all_reduce"}, text
