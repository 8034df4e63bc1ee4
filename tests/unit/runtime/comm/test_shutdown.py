import time

import torch.distributed as dist

from shardwright.runtime.comm.shutdown import leave


def test_threads_have_time_to_let_go_before_the_interpreter_ends(monkeypatch):
    done = []
    monkeypatch.setattr(dist, "destroy_process_group", lambda: done.append("left"))
    monkeypatch.setattr(time, "sleep", lambda seconds: done.append(seconds))
    leave()
    assert done[0] == "left" and 0 < done[1] < 1
