"""One rank's recorded steps in one HDF5 file: append-only, readable at any moment, checked when read.

Place in the flow: tensor -> digest -> event -> *store* -> align -> diff -> report.

A file of an initial snapshot and three steps of a little model:

    rank-00000.h5
    |-- @schema         "bitcheck.rank/1"
    |-- @header         {"checksum": "534c...", "digest_version": 1, "leaf_limit_bytes": 1048576, "level": "module",
    |                    "rank": 0, "run_id": "0c3f...", "schema": "bitcheck.rank/1", "world_size": 1,
    |                    "writer": {"host": "node-17", "pid": 4242, "pid_started": 183482}}
    |-- status          [1]        1             0 recording, 1 complete, 2 failed
    |
    |   grow with every step
    |-- steps           [4]        step 0, kind STEP, 11 events, 120112 bytes, layout 1, meta 1, first_event 3,
    |                              first_leaf 6, num_leaves 17, first_value 0, num_values 1, notes -> "[{},[]]",
    |                              totals so far, 13 phase_roots, root f8b0..., state_root dfb4...,
    |                              contents 53a1..., chain e062..., check
    |-- digests         [36, 16]   one an event, in the order in which they happened
    |-- leaves          [57, 16]   of the events that keep them, one after the other
    |-- values          [3]        -> "0.05"     of the events that have one; a step like the one before adds none
    |
    |   grow where a step is unlike all before it
    |-- layouts         [2]        first_event 3, num_events 11, first_group 0, num_groups 4, first_input 0,
    |                              num_inputs 3, hash 74c9...
    |-- layout_events   [14]       site 3, group 0, num_inputs 0
    |-- layout_inputs   [3]        0             the event, counted within its step, that another was computed from
    |-- layout_groups   [4]        group 1, parent 0
    |-- metas           [2]        first_event 3, num_events 11, hash 1ba6...
    |-- meta_tensors    [14]       -> tensors    one an event
    |
    |   grow where something is named that was not before
    |-- sites           [11]       phase param, is_eval 0, root -> "Model", path -> "blocks.0.weight",
    |                              slot -> "value", occurrence 0
    |-- groups          [4]        kind -> "forward", root -> "Model", path -> "blocks.0", op -> "Linear"
    |-- tensors         [4]        dtype -> "float32", shape -> "5,1000", num_bytes 20000, num_leaves 2, has_value 0
    |-- string_ends     [26]       5, 20, 25     where each string ends in `strings`
    `-- strings         [214]      "Modelblocks.0.weightvalue..."

`->` is a row number of `string_ends` (or of the table named). Rows are never changed. A step's row is
written when all that it refers to is on the disk, so what a reader finds, or what a SIGKILL leaves, is a
number of whole steps. Of every table but `steps` a reader takes only what the steps refer to.

The parts: `format` (types, opening), `layout` (what steps share; roots and the chain), `known` (what a
writer knows of it from the steps before), `file` (the HDF5 file while it is written), `writer`,
`unfinished` (opening what no writer closed), `rank_file` (the HDF5 file while it is read), `reader`,
`step`, `seal`.
"""

from __future__ import annotations

from bitcheck.store.format import STATUSES, STEP_ROW, TAIL_ROW
from bitcheck.store.layout import CHAIN_SEED, Layout, Meta, link_chain
from bitcheck.store.reader import RankReader
from bitcheck.store.seal import hash_file, read_seal
from bitcheck.store.step import LoadedStep
from bitcheck.store.writer import RankWriter

__all__ = [
    "CHAIN_SEED",
    "STATUSES",
    "STEP_ROW",
    "TAIL_ROW",
    "Layout",
    "LoadedStep",
    "Meta",
    "RankReader",
    "RankWriter",
    "hash_file",
    "link_chain",
    "read_seal",
]
