"""A client of the time-slice orchestrator: stubs of its own, nothing of ours. It does what its standard input says.

    orchestrator_client.py STUBS SERVICE ADDRESS JOB GROUP [UID]     UID: number of the user as whom it connects

    acquire [SECONDS] | acquire-as ROLE | yield | status | groups | turns N SECONDS RECORD

and prints one line of JSON for each: the answer, or {"code": ..., "details": ...}. `turns` writes a record as
`little_program.py` does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import grpc
from google.protobuf.json_format import MessageToDict


def main(stubs: str, service: str, address: str, job: str, group: str, uid: str = "") -> None:
    sys.path.insert(0, stubs)
    import orchestrator_pb2 as pb2
    import orchestrator_pb2_grpc as pb2_grpc

    if uid:
        os.setuid(int(uid))
    stub = getattr(pb2_grpc, f"{service}Stub")(grpc.insecure_channel(address))

    def acquire(limit_s: float | None = None, role: int = 0):
        return stub.Acquire(pb2.AcquireRequest(job_id=job, group_id=group, role=role), timeout=limit_s)

    def give_back():
        request = pb2.YieldRequest(job_id=job, group_id=group)
        request.expected_idle.FromMilliseconds(1500)
        return stub.Yield(request)

    def turns(number: int, seconds: float, record: str) -> None:
        def write(what: str) -> None:
            with Path(record).open("a", encoding="utf-8") as lines:
                lines.write(json.dumps([time.monotonic(), f"{job}@{group}", what, 0]) + "\n")

        for _ in range(number):
            acquire()
            write("begins")
            time.sleep(seconds)
            write("ends")
            give_back()

    for line in sys.stdin:
        what, *words = line.split()
        try:
            if what == "acquire":
                answer = acquire(*map(float, words))
            elif what == "acquire-as":
                answer = acquire(role=int(words[0]))
            elif what == "yield":
                answer = give_back()
            elif what == "status":
                answer = stub.GetGroupStatus(pb2.GetGroupStatusRequest(group_id=group))
            elif what == "groups":
                answer = stub.ListGroups(pb2.ListGroupsRequest())
            else:
                answer = turns(int(words[0]), float(words[1]), words[2])
            told = {} if answer is None else MessageToDict(answer, always_print_fields_with_no_presence=True)
        except grpc.RpcError as error:
            told = {"code": error.code().name, "details": error.details()}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
