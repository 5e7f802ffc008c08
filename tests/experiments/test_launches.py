"""What a compiled program launches."""

import json

from experiments.launches import PROGRAMS, launches
from experiments.launches import RECORD as RECORD_OF_LAUNCHES

PROGRAM = """\
%fused (p: f32[8]) -> f32[8] {
  %two = f32[8]{0} add(%p, %p)
  ROOT %three = f32[8]{0} multiply(%two, %p)
}

%layer (carry: (s32[], f32[8])) -> (s32[], f32[8]) {
  %one = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused
  ROOT %out = (s32[], f32[8]) tuple(%i, %one)
}

%token (carry: (s32[], f32[8])) -> (s32[], f32[8]) {
  %called = (f32[8]{0}, s8[4]{0}) custom-call(%x), custom_call_target="mosaic_gpu_v2", api_version=4
  %layers = (s32[], f32[8]) while(%t), condition=%less, body=%layer, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %out = (s32[], f32[8]) tuple(%i, %y)
}

%less (carry: (s32[], f32[8])) -> pred[] {
  ROOT %is = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %started = ((f32[8]{0}), f32[8]{0}) fusion-start(%p), calls=%fused
  %done = f32[8]{0} fusion-done(%started)
  %w = (s32[], f32[8]) while(%t), condition=%less, body=%token
  ROOT %copied = f32[8]{0} copy(%done)
}
"""


def test_launches_are_counted_by_round():
    once, a_round = launches(PROGRAM)
    assert once == {"fusion-start": 1, "copy": 1}
    # conditions of loops are on the device, too
    assert a_round == {"mosaic_gpu_v2": 1, "fusion": 3, "compare": 1 + 3}


def test_the_record_has_every_program():
    found = json.loads(RECORD_OF_LAUNCHES.read_text())["programs"]
    assert [(each["what"], each["recipe"]) for each in found] == [
        (program.what, program.recipe) for program in PROGRAMS
    ]
    for each in found:
        assert each["a layer"] == sum(each["by kind"].values()) > 0
