//! The kernels that use the switch. On one GPU a multicast object has one member, so reads return what was written:
//! this shows that the instructions run and which addresses they use, not how a switch adds.

use fastrand::Rng;
use semmoe_kernels::Element;

use crate::checks;
use crate::machine::Machine;
use crate::setting::{Outcome, Setting};

pub(crate) fn check<T: Element>(setting: Setting<'_>, rng: &mut Rng) -> Outcome {
    if !(setting.hidden * size_of::<T>()).is_multiple_of(16) {
        return Outcome::NotRun("NVLS needs rows of whole vectors".to_owned());
    }
    match setting.machine {
        // The scalar path sums in rank order.
        Machine::Shim(_) => checks::reduce_scatter::<T>(setting, rng, true, true)
            .and_then(|()| checks::allgather::<T>(setting, rng, true, true))
            .into(),
        #[cfg(feature = "cuda")]
        Machine::Gpu(device) => switch::check::<T>(device, setting, rng),
    }
}

/// Runs through the switch, with this GPU as its only member.
#[cfg(feature = "cuda")]
mod switch {
    use fastrand::Rng;
    use semmoe_kernels::{Element, RowSplit};
    use semmoe_kernels_cuda::driver::Device;
    use semmoe_kernels_cuda::driver::memory::{read, write};
    use semmoe_kernels_cuda::vmm::{Memory, Multicast, VmmError};
    use semmoe_kernels_cuda::{Allgather, Buffer, ReduceScatter, RowOrder, Rows, Split};
    use semmoe_reference as reference;

    use crate::machine::text;
    use crate::setting::{Outcome, Setting, run};
    use crate::world::{World, elements, order};
    use semmoe_reference::data::same;

    pub(super) fn check<T: Element>(device: &Device, setting: Setting<'_>, rng: &mut Rng) -> Outcome {
        let bytes = (setting.tokens * setting.hidden * size_of::<T>()) as u64;
        // The GPU may support multicast while the rest of the machine does not, for example if the switch is managed
        // elsewhere.
        let refused = |error: VmmError| Outcome::NotRun(format!("NVLS: {error}"));
        let memory = match Memory::new(device, bytes, Some(1)) {
            Ok(memory) => memory,
            Err(error) => return refused(error),
        };
        let mut object = match Multicast::new(device, 1, bytes) {
            Ok(object) => object,
            Err(error) => return refused(error),
        };
        match object.add_device().and_then(|()| object.bind(&memory)) {
            Ok(address) => compare::<T>(setting, rng, memory.buffer(), address).into(),
            Err(error) => refused(error),
        }
    }

    fn compare<T: Element>(setting: Setting<'_>, rng: &mut Rng, own: Buffer, switch: Buffer) -> Result<(), String> {
        let Setting { machine, tokens, hidden, .. } = setting;
        let world = World::new(machine, 1)?;
        let order = order(rng, tokens, 1);
        let part: Vec<T> = elements(rng, tokens * hidden);
        // SAFETY: the memory is mapped and has these bytes.
        unsafe { write(own, bytemuck::cast_slice(&part)) }.map_err(text)?;
        let order_memory = machine.holding(bytemuck::cast_slice(order.permutation()))?;
        let permutation = [order_memory.buffer()];
        let split = Split { permutation: Some(&permutation), offsets: None };
        let bytes = tokens * hidden * size_of::<T>();
        let sums = machine.each(1, bytes)?;
        let rows = Rows { tokens: tokens as u64, hidden: hidden as u64, dtype: T::DTYPE };
        let row_order = RowOrder { rows, split, capacity: rows.tokens, multicast: Some(switch) };
        let grid = machine.grid(1, setting.small);
        let (own_at, sums_at) = ([own], [sums[0].buffer()]);
        let reduce = ReduceScatter { parts: &own_at, out: &sums_at, order: row_order };
        run(setting, &world, reduce.launch(&world.team, grid))?;
        let expected = reference::reduce_scatter(&[&part], hidden, RowSplit::from(&order)).map_err(text)?;
        same("sums", &sums[0].read::<T>()?, &expected[0])?;
        // SAFETY: as above.
        unsafe { write(own, &vec![0xff; bytes]) }.map_err(text)?;
        let gather = Allgather { from: &sums_at, out: &own_at, order: row_order };
        run(setting, &world, gather.launch(&world.team, grid))?;
        // SAFETY: as above.
        let found = unsafe { read(own, bytes) }.map_err(text)?;
        let found: Vec<T> = found.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect();
        same("gathered rows", &found, &part)
    }
}
