//! Calls that the collectives over GPU memory reject, and the loss of a rank inside a call.

use semmoe_kernels::collectives::{AllRowsIn, OwnRowsIn, UnitError};
use semmoe_kernels::{DispatchPlan, RowSplit};
use semmoe_kernels_cuda::hosts::Hosts;
use semmoe_kernels_cuda::unit::{Room, RowMover, SentRows};
use semmoe_kernels_cuda::{Buffer, Rows, Stopped, Team};

use super::network::{self, Nccl};
use super::{Memory, TIMEOUT, hosts, on_device, peers, shim};
use semmoe_reference::law::on_ranks;

fn everywhere(tokens: usize, ranks: usize) -> DispatchPlan {
    let mut plan = DispatchPlan::default();
    plan.build_everywhere(&vec![0; tokens], &vec![1.0; tokens], 1, ranks).unwrap();
    plan
}

#[test]
fn operands_beyond_the_memory_are_refused_before_any_launch() {
    if shim().is_none() {
        return;
    }
    for mut end in [peers::<f32>(1, 8, |_| 2).remove(0), hosts(1, 8, 2, None).remove(0)] {
        let refused = |outcome: Result<(), UnitError>, expected: &str| {
            let error = outcome.unwrap_err();
            assert!(matches!(error, UnitError::Operands { rank: 0, .. }), "{error}");
            assert!(error.to_string().contains(expected), "{error}");
        };
        refused(end.part(17).map(drop), "17 row elements exceed the 16 that fit in its memory");
        let (offsets, rows) = ([0, 2], vec![0.0; 24]);
        let split = RowSplit::contiguous(&offsets).unwrap();
        end.part(8).unwrap();
        refused(end.reduce_scatter(8, split, None, on_device(&rows[..16])), "the part: 8 elements, expected 16");
        end.part(16).unwrap();
        refused(end.reduce_scatter(8, split, None, on_device(&rows[..8])), "out: 8 elements, expected 16");
        let offsets = [0, 3];
        let split = RowSplit::contiguous(&offsets).unwrap();
        let own = OwnRowsIn { rows: on_device(&rows), hidden: 8, labels: &[], width: 0, bound: 0 };
        let all = AllRowsIn { rows: on_device(&rows), labels: &mut [] };
        refused(end.allgather(own, split, all), "24 row elements exceed the 16");
        refused(end.dispatch(on_device(&rows[..8]), 8, &everywhere(2, 1)), "the rows: 8 elements, expected 16");
        refused(end.dispatch(on_device(&rows), 8, &everywhere(3, 1)), "24 row elements exceed the 16");
    }
}

#[test]
fn a_rank_that_is_lost_inside_a_call_is_named() {
    if shim().is_none() {
        return;
    }
    // Rank 1 has no room for its rows: by then its peer has launched, and its kernel stops.
    let errors = on_ranks(peers::<f32>(2, 8, |rank| 4 - 2 * rank), |rank, mut end| {
        let (plan, rows) = (everywhere(2, 2), vec![0.0; 16]);
        let dispatched = end.dispatch(on_device(&rows), 8, &plan);
        if rank == 1 { dispatched.unwrap_err() } else { end.combine(&plan, on_device(&rows)).unwrap_err() }
    });
    assert!(matches!(&errors[1], UnitError::Operands { rank: 1, .. }), "{}", errors[1]);
    let expected = "rank 1 was lost: rank 0 timed out waiting for rank 1 to start call 1";
    assert_eq!(errors[0].to_string(), expected);
}

#[test]
fn what_nccl_refuses_comes_back_in_its_words() {
    if shim().is_none() {
        return;
    }
    // The first group belongs to the dispatch, the second to the combine.
    for refused in [1, 2] {
        let errors = on_ranks(hosts::<f32>(2, 8, 8, Some(refused)), |_, mut end| {
            let (plan, rows) = (everywhere(2, 2), vec![0.0; 16]);
            let dispatched = end.dispatch(on_device(&rows), 8, &plan);
            if refused == 1 {
                return dispatched.unwrap_err();
            }
            dispatched.unwrap();
            end.combine(&plan, on_device(&rows)).unwrap_err()
        });
        for (rank, error) in errors.iter().enumerate() {
            assert_eq!(error.to_string(), format!("rank {rank}: NCCL refused: out of luck"));
        }
    }
}

/// Counts that contradict the offsets stop the kernel before it writes past a segment.
#[test]
fn counts_of_another_plan_stop_the_kernel() {
    if shim().is_none() {
        return;
    }
    let room = Room { ranks: 1, rows: 4, hidden: 8, top_k: 1, dtype: semmoe_kernels::Dtype::F32 };
    let memory = Memory::new(1, std::iter::once(room.hosts_bytes()));
    let (signals, report, own) = (memory.signals[0].buffer(), memory.reports[0].buffer(), memory.others[0].buffer());
    let team = || Team::alone(1, 0, signals, report, TIMEOUT).unwrap();
    let nccl = || Nccl::new(0, 1, network::group(1), None);
    // SAFETY: the memory outlives both.
    let small = unsafe { Hosts::new(room, team(), Buffer { bytes: 99, ..own }, nccl(), memory.stream(0, None)) };
    assert!(small.err().unwrap().to_string().starts_with("memory 0 has 99 bytes, expected at least"));
    // SAFETY: as above.
    let mut mover = unsafe { Hosts::new(room, team(), own, nccl(), memory.stream(0, None)) }.unwrap();
    let rows = Rows { tokens: 3, hidden: 8, dtype: semmoe_kernels::Dtype::F32 };
    let call = SentRows { rows, places: &[0, 1, 2], sent: &[2], received: &[2] };
    // A vector's memory is aligned.
    let x = vec![1.0f32; 24];
    mover.dispatch(call, on_device(&x)).unwrap();
    let stopped = RowMover::<f32>::stopped(&mover);
    assert!(matches!(stopped, Some(Stopped::Rows { rank: 0, peer: 0, .. })), "{stopped:?}");
}
