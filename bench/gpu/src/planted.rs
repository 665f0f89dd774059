//! A planted defect, which proves that the sanitizer reports errors.

use semmoe_kernels::Dtype;
use semmoe_kernels_cuda::{Buffer, Grid, ReduceScatter, RowOrder, Rows, Split};
use serde_json::json;

use crate::machine::{Machine, buffers, text};
use crate::measure::Report;
use crate::world::World;

/// A reduce-scatter whose part is four bytes shorter than the call states.
pub(crate) fn report(machine: &Machine) -> Report {
    if matches!(machine, Machine::Shim(_)) {
        return Err("planted is for compute-sanitizer on a GPU; the shim's own tests plant one for ASan".to_owned());
    }
    let world = World::new(machine, 1)?;
    let (part, out) = (machine.filled(1020, 0)?, machine.each(1, 1024)?);
    let call = ReduceScatter {
        parts: &[Buffer { bytes: 1024, ..part.buffer() }],
        out: &buffers(&out),
        order: RowOrder {
            rows: Rows { tokens: 4, hidden: 64, dtype: Dtype::F32 },
            split: Split::default(),
            capacity: 4,
            multicast: None,
        },
    };
    let launch = call.launch(&world.team, Grid { blocks: 1, threads: 64 }).map_err(text)?;
    machine.run(&[launch]).map_err(|error| world.explain(error))?;
    Ok((json!({ "planted": "ran without an error of its own" }), true))
}
