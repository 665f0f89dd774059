//! Every kernel against the CPU reference on random data, bit for bit.

use fastrand::Rng;
use half::{bf16, f16};
use semmoe_kernels::{Dtype, Element, RankOrder, ResidualNorm, RowSplit};
use semmoe_kernels_cuda::{
    AllReduce, Allgather, Argsort, Grid, ReduceScatter, ReduceScatterNorm, RowOrder, Rows, Shuffle, Split,
};
use semmoe_reference as reference;
use semmoe_reference::data::{self, same, slices};
use serde_json::json;

use crate::machine::{Machine, Memory, buffers, text};
use crate::measure::Report;
use crate::options::{KERNELS, Options};
use crate::setting::{Outcome, Setting, run, shared};
use crate::world::{World, elements, order};
use crate::{attention, exchange, nvls, product, reshard};

pub(crate) fn report(machine: &Machine, options: &Options) -> Report {
    let shapes: &[(usize, usize)] = match options.small || options.cpu {
        true => &[(13, 24), (5, 7)],
        false => &[(4096, 2048), (1023, 4096), (77, 333)],
    };
    let mut rng = Rng::with_seed(options.seed);
    let mut rows = Vec::new();
    let mut good = true;
    for kernel in KERNELS.iter().filter(|&kernel| options.kernel.as_ref().is_none_or(|only| only == kernel)) {
        for (ranks, &(tokens, hidden)) in [2, 4, 8].into_iter().flat_map(|ranks| shapes.iter().map(move |s| (ranks, s)))
        {
            for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
                let setting = Setting { machine, small: options.small, ranks, tokens, hidden };
                let outcome = match dtype {
                    Dtype::Bf16 => one::<bf16>(kernel, setting, &mut rng),
                    Dtype::F16 => one::<f16>(kernel, setting, &mut rng),
                    Dtype::F32 => one::<f32>(kernel, setting, &mut rng),
                };
                good &= !matches!(outcome, Outcome::Differs(_));
                let (equal, difference, not_run) = match outcome {
                    Outcome::Equal => (Some(true), None, None),
                    Outcome::Differs(difference) => (Some(false), Some(difference), None),
                    Outcome::NotRun(reason) => (None, None, Some(reason)),
                };
                rows.push(json!({
                    "kernel": kernel, "ranks": ranks, "tokens": tokens, "hidden": hidden, "dtype": dtype.name(),
                    "equal": equal, "difference": difference, "not_run": not_run,
                }));
            }
        }
    }
    Ok((json!({ "machine": machine.name()?, "seed": options.seed, "checks": rows }), good))
}

fn one<T: Element>(kernel: &str, setting: Setting<'_>, rng: &mut Rng) -> Outcome {
    match kernel {
        "argsort" => argsort::<u32>(setting, rng).and_then(|()| argsort::<u16>(setting, rng)).into(),
        "srs" => reduce_scatter::<T>(setting, rng, true, false).into(),
        "reduce-scatter" => reduce_scatter::<T>(setting, rng, false, false).into(),
        "srs-norm" => reduce_scatter_norm::<T>(setting, rng).into(),
        "sag" => allgather::<T>(setting, rng, true, false).into(),
        "allgather" => allgather::<T>(setting, rng, false, false).into(),
        "all-reduce" => all_reduce::<T>(setting, rng).into(),
        "shuffle" => shuffle::<T>(setting, rng, false).and_then(|()| shuffle::<T>(setting, rng, true)).into(),
        "dispatch-combine" => exchange::check::<T>(setting, rng).into(),
        "reshard" => reshard::check(setting, rng, size_of::<T>()).into(),
        "nvls" => nvls::check::<T>(setting, rng),
        "matmul" => product::check::<T>(setting, rng),
        "attend" => attention::check::<T>(setting, rng),
        other => Outcome::Differs(format!("no check of kernel {other}")),
    }
}

/// Destinations are two or four bytes wide.
fn argsort<K: bytemuck::Pod + TryFrom<u32>>(setting: Setting<'_>, rng: &mut Rng) -> Result<(), String> {
    let Setting { machine, ranks, tokens, .. } = setting;
    let narrow: Vec<u16> = (0..tokens).map(|_| rng.u16(0..ranks as u16)).collect();
    let destinations: Vec<K> =
        narrow.iter().filter_map(|&destination| K::try_from(u32::from(destination)).ok()).collect();
    let world = World::new(machine, 1)?;
    let keys = machine.holding(bytemuck::cast_slice(&destinations))?;
    let permutation = machine.each(1, tokens * 4)?;
    let (inverse, offsets) = (machine.each(1, tokens * 4)?, machine.each(1, (ranks + 1) * 4)?);
    let call = Argsort {
        destinations: &[keys.buffer()],
        destination_bytes: size_of::<K>() as u64,
        items: tokens as u64,
        ranks: ranks as u64,
        permutation: &buffers(&permutation),
        inverse: &buffers(&inverse),
        offsets: &buffers(&offsets),
    };
    run(setting, &world, call.launch(&world.team, Grid { blocks: 1, threads: machine.sort_threads() }))?;
    let expected = data::order(&narrow, ranks);
    same("permutations", &permutation[0].read::<u32>()?, expected.permutation())?;
    same("inverses", &inverse[0].read::<u32>()?, expected.inverse())?;
    same("offsets", &offsets[0].read::<u32>()?, expected.offsets())
}

/// Parts of all ranks, and the permutation that shuffles them.
struct Inputs<T> {
    order: RankOrder,
    parts: Vec<Vec<T>>,
    memory: Vec<Memory>,
    permutation: Memory,
    offsets: Memory,
}

impl<T: Element> Inputs<T> {
    fn new(setting: Setting<'_>, rng: &mut Rng) -> Result<Self, String> {
        let Setting { machine, ranks, tokens, hidden, .. } = setting;
        let order = order(rng, tokens, ranks);
        let parts: Vec<Vec<T>> = (0..ranks).map(|_| elements(rng, tokens * hidden)).collect();
        let hold = |part: &Vec<T>| machine.holding(bytemuck::cast_slice(part));
        let memory = parts.iter().map(hold).collect::<Result<_, _>>()?;
        let permutation = machine.holding(bytemuck::cast_slice(order.permutation()))?;
        let offsets = machine.holding(bytemuck::cast_slice(order.offsets()))?;
        Ok(Self { order, parts, memory, permutation, offsets })
    }

    fn split(&self, shuffled: bool) -> Result<RowSplit<'_>, String> {
        match shuffled {
            true => Ok(RowSplit::from(&self.order)),
            false => RowSplit::contiguous(self.order.offsets()).map_err(text),
        }
    }
}

fn rows<T: Element>(setting: Setting<'_>) -> Rows {
    Rows { tokens: setting.tokens as u64, hidden: setting.hidden as u64, dtype: T::DTYPE }
}

/// A multicast address selects the scalar path of the NVLS kernel, because the shim has no switch. Checks the
/// reduce-scatter.
pub(crate) fn reduce_scatter<T: Element>(
    setting: Setting<'_>,
    rng: &mut Rng,
    shuffled: bool,
    multicast: bool,
) -> Result<(), String> {
    let Setting { machine, ranks, tokens, hidden, .. } = setting;
    let world = World::new(machine, ranks)?;
    let inputs = Inputs::<T>::new(setting, rng)?;
    let out = machine.each(ranks, tokens * hidden * size_of::<T>())?;
    let (permutation, offsets) = (shared(&inputs.permutation, ranks), shared(&inputs.offsets, ranks));
    let call = ReduceScatter {
        parts: &buffers(&inputs.memory),
        out: &buffers(&out),
        order: RowOrder {
            rows: rows::<T>(setting),
            split: Split { permutation: shuffled.then_some(&permutation[..]), offsets: Some(&offsets) },
            capacity: tokens as u64,
            multicast: multicast.then(|| inputs.memory[0].buffer()),
        },
    };
    run(setting, &world, call.launch(&world.team, setting.grid()))?;
    let split = inputs.split(shuffled)?;
    let expected = reference::reduce_scatter(&slices(&inputs.parts), hidden, split).map_err(text)?;
    for (out, expected) in out.iter().zip(&expected) {
        same("sums", &out.read::<T>()?[..expected.len()], expected)?;
    }
    Ok(())
}

fn reduce_scatter_norm<T: Element>(setting: Setting<'_>, rng: &mut Rng) -> Result<(), String> {
    let Setting { machine, ranks, tokens, hidden, .. } = setting;
    let world = World::new(machine, ranks)?;
    let inputs = Inputs::<T>::new(setting, rng)?;
    let bytes = tokens * hidden * size_of::<T>();
    let (out, residual_out) = (machine.each(ranks, bytes)?, machine.each(ranks, bytes)?);
    let (residual, weight) = (elements::<T>(rng, tokens * hidden), elements::<T>(rng, hidden));
    let residual_memory = machine.holding(bytemuck::cast_slice(&residual))?;
    let weight_memory = machine.holding(bytemuck::cast_slice(&weight))?;
    let (permutation, offsets) = (shared(&inputs.permutation, ranks), shared(&inputs.offsets, ranks));
    let epsilon = 1e-6;
    let call = ReduceScatterNorm {
        reduce: ReduceScatter {
            parts: &buffers(&inputs.memory),
            out: &buffers(&out),
            order: RowOrder {
                rows: rows::<T>(setting),
                split: Split { permutation: Some(&permutation), offsets: Some(&offsets) },
                capacity: tokens as u64,
                multicast: None,
            },
        },
        residual: &shared(&residual_memory, ranks),
        weight: &shared(&weight_memory, ranks),
        residual_out: &buffers(&residual_out),
        epsilon,
    };
    run(setting, &world, call.launch(&world.team, setting.grid().for_norm()))?;
    let norm = ResidualNorm { residual: &residual, weight: &weight, epsilon };
    let split = RowSplit::from(&inputs.order);
    let expected = reference::reduce_scatter_norm(&slices(&inputs.parts), hidden, split, norm).map_err(text)?;
    for (rank, expected) in expected.iter().enumerate() {
        same("normed rows", &out[rank].read::<T>()?[..expected.normed.len()], &expected.normed)?;
        same("residuals", &residual_out[rank].read::<T>()?[..expected.residual.len()], &expected.residual)?;
    }
    Ok(())
}

/// A multicast address selects the scalar path of the NVLS kernel, because the shim has no switch. Checks the
/// allgather.
pub(crate) fn allgather<T: Element>(
    setting: Setting<'_>,
    rng: &mut Rng,
    shuffled: bool,
    multicast: bool,
) -> Result<(), String> {
    let Setting { machine, ranks, tokens, hidden, .. } = setting;
    let world = World::new(machine, ranks)?;
    let inputs = Inputs::<T>::new(setting, rng)?;
    let out = machine.each(ranks, tokens * hidden * size_of::<T>())?;
    let (permutation, offsets) = (shared(&inputs.permutation, ranks), shared(&inputs.offsets, ranks));
    let call = Allgather {
        from: &buffers(&inputs.memory),
        out: &buffers(&out),
        order: RowOrder {
            rows: rows::<T>(setting),
            split: Split { permutation: shuffled.then_some(&permutation[..]), offsets: Some(&offsets) },
            capacity: tokens as u64,
            multicast: multicast.then(|| out[0].buffer()),
        },
    };
    run(setting, &world, call.launch(&world.team, setting.grid()))?;
    let split = inputs.split(shuffled)?;
    let own = |rank: usize| &inputs.parts[rank][..split.positions(rank).len() * hidden];
    let slices: Vec<&[T]> = (0..ranks).map(own).collect();
    let expected = reference::allgather(&slices, hidden, split).map_err(text)?;
    out.iter().try_for_each(|out| same("gathered rows", &out.read::<T>()?, &expected))
}

fn all_reduce<T: Element>(setting: Setting<'_>, rng: &mut Rng) -> Result<(), String> {
    let Setting { machine, ranks, tokens, hidden, .. } = setting;
    let world = World::new(machine, ranks)?;
    let inputs = Inputs::<T>::new(setting, rng)?;
    let parts = buffers(&inputs.memory);
    let call = AllReduce { parts: &parts, out: &parts, elements: (tokens * hidden) as u64, dtype: T::DTYPE };
    run(setting, &world, call.launch(&world.team, setting.grid()))?;
    let expected = reference::all_reduce(&slices(&inputs.parts)).map_err(text)?;
    inputs.memory.iter().try_for_each(|part| same("sums", &part.read::<T>()?, &expected))
}

/// Every rank's rows by its permutation, or by the inverse if `back`.
fn shuffle<T: Element>(setting: Setting<'_>, rng: &mut Rng, back: bool) -> Result<(), String> {
    let Setting { machine, ranks, tokens, hidden, .. } = setting;
    let world = World::new(machine, ranks)?;
    let inputs = Inputs::<T>::new(setting, rng)?;
    let to = machine.each(ranks, tokens * hidden * size_of::<T>())?;
    let permutation = shared(&inputs.permutation, ranks);
    let from = buffers(&inputs.memory);
    let call = Shuffle { from: &from, to: &buffers(&to), permutation: &permutation, rows: rows::<T>(setting), back };
    run(setting, &world, call.launch(&world.team, setting.grid()))?;
    for (part, to) in inputs.parts.iter().zip(&to) {
        let mut expected = part.clone();
        for (position, &token) in inputs.order.permutation().iter().enumerate() {
            let (from, to) = if back { (position, token as usize) } else { (token as usize, position) };
            expected[to * hidden..][..hidden].copy_from_slice(&part[from * hidden..][..hidden]);
        }
        same("shuffled rows", &to.read::<T>()?, &expected)?;
    }
    Ok(())
}
