//! NCCL and a GPU that only write down what they are told, and a network that then does it for all ranks.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::rc::Rc;

use semmoe_kernels::{Dtype, Element};
use semmoe_kernels_cuda::Launch;
use semmoe_kernels_cuda::hosts::{Kind, Runner, Span, Wire};
use semmoe_kernels_shim::{Shim, Step};

use crate::support::{Run, World, run_all};

#[derive(Clone, Debug)]
pub(super) enum Event {
    Launch(Box<Launch>),
    Start,
    Send(Span, usize),
    Receive(Span, usize),
    Reduce(Span, u64, usize),
    Broadcast(u64, Span, usize),
    End,
}

/// What one rank was told, in order.
pub(super) type Script = Rc<RefCell<Vec<Event>>>;

pub(super) struct Recorder {
    rank: usize,
    ranks: usize,
    script: Script,
    /// Calls until one is refused.
    refuse: Option<usize>,
}

impl Recorder {
    pub(super) fn new(rank: usize, ranks: usize, script: Script) -> Self {
        Self { rank, ranks, script, refuse: None }
    }

    pub(super) fn refuse(&mut self, call: usize) {
        self.refuse = Some(call);
    }

    fn record(&mut self, event: Event) -> Result<(), String> {
        if let Some(left) = &mut self.refuse {
            *left = left.wrapping_sub(1);
            if *left == 0 {
                // An end that fails has ended the group all the same; a start that fails has begun none.
                if matches!(event, Event::End) {
                    self.script.borrow_mut().push(event);
                }
                return Err("out of luck".to_owned());
            }
        }
        self.script.borrow_mut().push(event);
        Ok(())
    }
}

impl Wire for Recorder {
    fn rank(&self) -> usize {
        self.rank
    }
    fn ranks(&self) -> usize {
        self.ranks
    }
    fn group_start(&mut self) -> Result<(), String> {
        self.record(Event::Start)
    }
    fn group_end(&mut self) -> Result<(), String> {
        self.record(Event::End)
    }
    unsafe fn send(&mut self, from: Span, peer: usize, _: *mut c_void) -> Result<(), String> {
        self.record(Event::Send(from, peer))
    }
    unsafe fn receive(&mut self, to: Span, peer: usize, _: *mut c_void) -> Result<(), String> {
        self.record(Event::Receive(to, peer))
    }
    unsafe fn reduce(&mut self, from: Span, to: u64, root: usize, _: *mut c_void) -> Result<(), String> {
        self.record(Event::Reduce(from, to, root))
    }
    unsafe fn broadcast(&mut self, from: u64, to: Span, root: usize, _: *mut c_void) -> Result<(), String> {
        self.record(Event::Broadcast(from, to, root))
    }
}

pub(super) struct Gpu(pub(super) Script);

impl Runner for Gpu {
    unsafe fn launch(&self, launch: &Launch, _: *mut c_void) -> Result<(), String> {
        self.0.borrow_mut().push(Event::Launch(Box::new(*launch)));
        Ok(())
    }
    fn blocks(&self) -> u32 {
        2
    }
}

/// Does what all ranks recorded: kernels on each rank, then each group together, and so on.
pub(super) fn play(shim: &Shim, world: &World, scripts: &[Script]) -> Result<(), String> {
    let mut left: Vec<VecDeque<Event>> =
        scripts.iter().map(|script| script.borrow().iter().cloned().collect()).collect();
    while left.iter().any(|events| !events.is_empty()) {
        let mut groups = Vec::new();
        for events in &mut left {
            while let Some(Event::Launch(launch)) = events.front() {
                run_all(shim, &[vec![Step::Launch(launch)]], Run::of(1), world)?;
                events.pop_front();
            }
            groups.push(group(events)?);
        }
        for rank in 0..groups.len() {
            move_all(rank, &groups)?;
        }
    }
    Ok(())
}

/// The calls of the group that comes next.
fn group(events: &mut VecDeque<Event>) -> Result<Vec<Event>, String> {
    match events.pop_front() {
        None => return Ok(Vec::new()),
        Some(Event::Start) => {}
        Some(other) => return Err(format!("{other:?} is in no group")),
    }
    let mut calls = Vec::new();
    loop {
        match events.pop_front() {
            Some(Event::End) => return Ok(calls),
            Some(Event::Launch(_)) | None => return Err("a group was not ended".to_owned()),
            Some(call) => calls.push(call),
        }
    }
}

fn bytes(span: Span) -> usize {
    (span.count * span.kind.bytes()) as usize
}

fn copy(from: u64, to: Span) {
    // SAFETY: the calls promise that both are memory of the test, of this length; they may be the same.
    unsafe { std::ptr::copy(from as *const u8, to.address as *mut u8, bytes(to)) };
}

/// Everything that one rank receives: the n-th receipt from a peer gets the peer's n-th sending to it.
fn move_all(rank: usize, groups: &[Vec<Event>]) -> Result<(), String> {
    let mut taken = vec![0; groups.len()];
    for call in &groups[rank] {
        let Event::Receive(to, peer) = call else { continue };
        let mut sent = groups[*peer].iter().filter_map(|call| match call {
            Event::Send(from, to) if *to == rank => Some(*from),
            _ => None,
        });
        let from = sent.nth(taken[*peer]).ok_or_else(|| format!("rank {peer} sends too little to rank {rank}"))?;
        taken[*peer] += 1;
        if (from.count, from.kind) != (to.count, to.kind) {
            return Err(format!("rank {peer} sends {from:?} to rank {rank}, which wants {to:?}"));
        }
        copy(from.address, *to);
    }
    for (peer, group) in groups.iter().enumerate() {
        let sent = group.iter().filter(|call| matches!(call, Event::Send(_, to) if *to == rank)).count();
        if sent != taken[peer] {
            return Err(format!("rank {peer} sends {sent} times to rank {rank}, which receives {} times", taken[peer]));
        }
    }
    for (index, call) in groups[rank].iter().enumerate() {
        match call {
            Event::Reduce(own, to, root) if *root == rank => reduce(index, *own, *to, groups)?,
            Event::Broadcast(_, to, root) => match groups[*root].get(index) {
                Some(Event::Broadcast(from, theirs, _)) if bytes(*theirs) == bytes(*to) => copy(*from, *to),
                other => return Err(format!("rank {root} does not broadcast: {other:?}")),
            },
            _ => {}
        }
    }
    Ok(())
}

fn reduce(index: usize, own: Span, to: u64, groups: &[Vec<Event>]) -> Result<(), String> {
    let mut parts = Vec::new();
    for group in groups {
        match group.get(index) {
            Some(Event::Reduce(from, ..)) if (from.count, from.kind) == (own.count, own.kind) => {
                parts.push(from.address)
            }
            other => return Err(format!("a rank does not reduce {own:?}: {other:?}")),
        }
    }
    match own.kind {
        Kind::Element(Dtype::F32) => sum::<f32>(&parts, own.count, to),
        Kind::Element(Dtype::F16) => sum::<half::f16>(&parts, own.count, to),
        Kind::Element(Dtype::Bf16) => sum::<half::bf16>(&parts, own.count, to),
        other => return Err(format!("sums of {other:?}")),
    }
    Ok(())
}

/// In rank order, as the reference adds; a real NCCL may add otherwise.
fn sum<T: Element>(parts: &[u64], count: u64, to: u64) {
    let of = |address: u64| {
        // SAFETY: the call promises that many elements there.
        unsafe { std::slice::from_raw_parts(address as *const T, count as usize) }
    };
    let slices: Vec<&[T]> = parts.iter().map(|&part| of(part)).collect();
    let sums = semmoe_kernels::reference::all_reduce(&slices).expect("parts of one length");
    // SAFETY: the root's call promises room for them.
    unsafe { std::ptr::copy_nonoverlapping(sums.as_ptr(), to as *mut T, sums.len()) };
}
