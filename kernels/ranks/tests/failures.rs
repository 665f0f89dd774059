//! Ranks that are late, leave, or disagree: every rank gets an error soon, and none waits forever.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::time::Duration;

use common::{PATIENCE, on_ranks};
use half::bf16;
use semmoe_kernels::{KernelError, RoutedTokens, RowSplit, even_offsets};
use semmoe_ranks::{Communicator, Dispatch, RankError, RawGroup, Received, Routes, SIGNAL_BYTES, Span, threads};
use semmoe_reference::data::order;
use semmoe_tables::RankId;

const SOON: Duration = Duration::from_secs(2);

/// Plain reduce-scatter of n tokens of two columns.
fn scatter(comm: &mut Communicator, n: usize) -> Result<(), RankError> {
    let offsets = even_offsets(n, comm.world()).unwrap();
    let split = RowSplit::contiguous(&offsets).unwrap();
    let mut out = vec![0.0f32; split.positions(comm.rank().index()).len() * 2];
    comm.reduce_scatter(Span::new(0, n * 2).unwrap(), 2, split, &mut out)
}

#[test]
fn a_rank_that_never_arrives_is_named_with_the_epoch() {
    let mut comms = threads(3, 4096, SOON).unwrap();
    let late = comms.pop().unwrap();
    let answers = on_ranks(comms, |comm| {
        let first = scatter(comm, 8);
        // Neither the group nor its memory can be used any more: the late rank may still arrive.
        assert_eq!(scatter(comm, 8), first);
        assert_eq!(comm.view(Span::<u8>::new(0, 8).unwrap()).unwrap_err(), first.clone().unwrap_err());
        first.unwrap_err()
    });
    let timed_out = RankError::TimedOut { rank: RankId::new(2), epoch: 1, limit: SOON };
    assert!(answers.contains(&timed_out), "{answers:?}");
    for answer in &answers {
        // The one that gave up first may have notified the other, with the same cause.
        let reported = matches!(answer, RankError::GaveUp { cause, epoch: 1, .. } if *cause == RankId::new(2));
        assert!(*answer == timed_out || reported, "{answer}");
        assert!(answer.to_string().contains("rank 2 did not arrive"), "{answer}");
    }
    // It arrives after all, and learns at once that the others are gone.
    let mut late = late;
    let found = scatter(&mut late, 8).unwrap_err();
    assert!(matches!(found, RankError::GaveUp { epoch: 1, .. } | RankError::Left { epoch: 1, .. }), "{found}");
}

#[test]
fn a_rank_that_leaves_in_the_middle_ends_the_wait_of_all() {
    let comms = threads(4, 4096, PATIENCE).unwrap();
    let answers = on_ranks(comms, |comm| {
        for _ in 0..3 {
            scatter(comm, 8)?;
        }
        if comm.rank().index() == 1 { Ok(()) } else { scatter(comm, 8) }
    });
    assert_eq!(answers[1], Ok(()));
    for rank in [0, 2, 3] {
        let error = answers[rank].clone().unwrap_err();
        // Two epochs per collective; the seventh is the fourth's entry.
        let left = RankError::Left { rank: RankId::new(1), epoch: 7 };
        let reported = matches!(error, RankError::GaveUp { epoch: 7, cause, .. } if cause == RankId::new(1));
        let gone = matches!(error, RankError::Left { epoch: 7, .. });
        assert!(error == left || reported || gone, "{error}");
        let is_final = matches!(error, RankError::TimedOut { .. } | RankError::Left { .. } | RankError::GaveUp { .. });
        assert!(is_final);
    }
}

#[test]
fn ranks_that_disagree_all_get_an_error_and_go_on() {
    type Calls = fn(&mut Communicator) -> Result<(), RankError>;
    let cases: [(&str, Calls); 6] = [
        ("tokens", |comm| scatter(comm, if comm.rank().index() == 2 { 10 } else { 8 })),
        ("operation", |comm| match comm.rank().index() {
            0 => comm.all_reduce(Span::<f32>::new(0, 8)?, Span::new(64, 8)?),
            _ => scatter(comm, 8),
        }),
        ("operation", |comm| if comm.rank().index() == 1 { comm.barrier() } else { scatter(comm, 8) }),
        ("element type", |comm| match comm.rank().index() {
            0 => comm.all_reduce(Span::<f32>::new(0, 8)?, Span::new(64, 8)?),
            _ => comm.all_reduce(Span::<bf16>::new(0, 8)?, Span::new(64, 8)?),
        }),
        ("second offset", |comm| {
            let to = if comm.rank().index() == 2 { 128 } else { 64 };
            comm.all_reduce(Span::<f32>::new(0, 8)?, Span::new(to, 8)?)
        }),
        ("digest of the order or placement", |comm| {
            let order = order(&[0, 1, 2, 0, if comm.rank().index() == 0 { 1 } else { 2 }], 3);
            let split = RowSplit::from(&order);
            let rows = vec![0.0f32; split.positions(comm.rank().index()).len()];
            comm.allgather(&rows, 1, split, Span::new(0, 5)?)
        }),
    ];
    let answers = on_ranks(threads(3, 4096, PATIENCE).unwrap(), |comm| {
        cases.map(|(_, call)| {
            let error = call(comm).unwrap_err();
            // Still in step: the next collective works.
            scatter(comm, 8).unwrap();
            error
        })
    });
    for errors in answers {
        for (error, (name, _)) in errors.iter().zip(&cases) {
            assert!(matches!(error, RankError::Disagree { what, .. } if what == name), "{name}: {error}");
        }
    }
}

#[test]
fn too_many_rows_for_a_rank_fail_on_all() {
    let answers = on_ranks(threads(2, 4096, PATIENCE).unwrap(), |comm| {
        // Both ranks send three tokens to rank 1, which has room for five.
        let received = Received {
            rows: Span::<f32>::new(0, 5)?,
            tokens: Span::new(64, 5)?,
            experts: Span::new(128, 5)?,
            weights: Span::new(192, 5)?,
        };
        let (x, experts, weights) = (&[1.0; 3][..], &[1, 1, 1][..], &[1.0; 3][..]);
        let tokens = RoutedTokens { x, experts, weights };
        let routes = Routes { tokens, rank_of_expert: &[0, 1], top_k: 1, hidden: 1 };
        let (mut source_offsets, mut sent_rows) = ([0; 3], [0; 6]);
        let out = Dispatch { source_offsets: &mut source_offsets, sent_rows: &mut sent_rows };
        let answer = comm.dispatch(routes, received, out);
        scatter(comm, 8).unwrap();
        answer
    });
    let expected = Err(RankError::Capacity { rank: RankId::new(1), rows: 6, capacity: 5 });
    assert_eq!(answers, [expected.clone(), expected]);
}

#[test]
fn operands_that_do_not_fit_are_refused_before_anything_happens() {
    // With a single rank, any of these that took part would time out.
    let mut comms = threads(2, 64, SOON).unwrap();
    let comm = &mut comms[0];
    let (two, three) = (even_offsets(4, 2).unwrap(), even_offsets(4, 3).unwrap());
    let split = RowSplit::contiguous(&two).unwrap();
    let span = |offset, len| Span::<f32>::new(offset, len).unwrap();
    let length = |what, found, expected| RankError::from(KernelError::Length { what, found, expected });
    let mut out = [0.0f32; 4];
    for (found, expected) in [
        (comm.reduce_scatter(span(0, 9), 2, split, &mut out), length("the part", 9, 8)),
        (
            comm.reduce_scatter(span(48, 8), 2, split, &mut out),
            RankError::TooLarge { what: "the part", found: 80, limit: 64 },
        ),
        (comm.reduce_scatter(span(0, 8), 2, split, &mut out[..3]), length("out", 3, 4)),
        (
            comm.reduce_scatter(span(0, 8), 2, RowSplit::contiguous(&three).unwrap(), &mut out),
            length("ranks of the split", 3, 2),
        ),
        (comm.allgather(&out[..2], 2, split, span(0, 8)), length("rows", 2, 4)),
        (comm.all_reduce(span(0, 8), span(16, 8)), RankError::Overlap { first: "the part", second: "out" }),
        (
            comm.combine(span(0, 8), 2, &[0, 4], &mut out[..2]),
            KernelError::OutOfRange { what: "sent row", index: 1, found: 4, bound: 4 }.into(),
        ),
        (Span::<f32>::new(8, 1).map(|_| ()), RankError::Misaligned { what: "a span", found: 8, alignment: 16 }),
        (
            Span::<f32>::new(16, usize::MAX).map(|_| ()),
            RankError::TooLarge { what: "bytes of a span", found: u64::MAX, limit: isize::MAX as u64 },
        ),
    ] {
        assert_eq!(found, Err(expected));
    }
    // An argsort that was never filled is a split over no ranks.
    let none = semmoe_kernels::RankOrder::default();
    assert!(comm.reduce_scatter(span(0, 0), 2, RowSplit::from(&none), &mut []).is_err());
    // The other rank is absent, so the first call that takes part times out.
    assert!(matches!(comm.barrier(), Err(RankError::TimedOut { epoch: 1, .. })));
}

#[test]
fn groups_that_cannot_be_are_refused() {
    for world in [0, 65, usize::MAX] {
        assert_eq!(threads(world, 64, SOON).err(), Some(RankError::World { found: world, limit: 64 }));
    }
    assert!(matches!(threads(2, usize::MAX, SOON), Err(RankError::TooLarge { .. })));
    let mut memory = vec![0u64; 1024];
    let base = memory.as_mut_ptr().cast::<u8>();
    let base = base.wrapping_add(base.align_offset(64));
    let (buffers, signals) = ([base], [base.wrapping_add(SIGNAL_BYTES)]);
    let whole = RawGroup { rank: 0, buffers: &buffers, buffer_bytes: 64, signals: &signals, timeout: SOON };
    // SAFETY: rejected before any access, except the last, whose memory is in `memory`.
    unsafe {
        assert!(matches!(
            Communicator::join(RawGroup { rank: 1, ..whole }),
            Err(RankError::NoSuchRank { rank: 1, world: 1 })
        ));
        let odd = [base.wrapping_add(8)];
        assert!(matches!(Communicator::join(RawGroup { buffers: &odd, ..whole }), Err(RankError::Misaligned { .. })));
        assert!(matches!(Communicator::join(RawGroup { signals: &odd, ..whole }), Err(RankError::Misaligned { .. })));
        let null = [std::ptr::null_mut()];
        assert!(matches!(Communicator::join(RawGroup { buffers: &null, ..whole }), Err(RankError::Memory { .. })));
        let first = Communicator::join(whole);
        assert!(first.is_ok());
        assert_eq!(Communicator::join(whole).err(), Some(RankError::Joined { rank: RankId::new(0) }));
    }
}
