//! Ranks as processes with shared memory. This program starts itself again for the other ranks.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::{PATIENCE, values};
use half::bf16;
use memmap2::MmapRaw;
use semmoe_kernels::RowSplit;
use semmoe_ranks::{Communicator, RankError, RawGroup, SIGNAL_BYTES, Span, attach_memory, create_memory, threads};
use semmoe_reference as reference;
use semmoe_reference::data::{order, slices};
use semmoe_tables::RankId;

const WORLD: usize = 4;
const TOKENS: usize = 37;
const HIDDEN: usize = 19;

/// Memory of a group as mapped here: signals, then buffers.
struct Group {
    file: File,
    map: MmapRaw,
    world: usize,
}

const BUFFER_BYTES: usize = 1 << 16;

impl Group {
    fn create(world: usize) -> Self {
        let (file, map) = create_memory("group", world * (SIGNAL_BYTES + BUFFER_BYTES)).unwrap();
        Self { file, map, world }
    }

    fn comm(&self, rank: usize, timeout: Duration) -> Result<Communicator, RankError> {
        let at = |first: usize, bytes| (0..self.world).map(move |rank| first + rank * bytes);
        let places = |places: &mut dyn Iterator<Item = usize>| -> Vec<*mut u8> {
            places.map(|at| self.map.as_mut_ptr().wrapping_add(at)).collect()
        };
        let buffers = places(&mut at(0, BUFFER_BYTES));
        let signals = places(&mut at(self.world * BUFFER_BYTES, SIGNAL_BYTES));
        let group = RawGroup { rank, buffers: &buffers, buffer_bytes: BUFFER_BYTES, signals: &signals, timeout };
        // SAFETY: the parts are disjoint in the map, which the test keeps until its communicators are gone.
        unsafe { Communicator::join(group) }
    }
}

/// The `child` of this program: the environment has the path of the memory, the rank and the task.
#[test]
#[ignore = "a part of the other tests, which start it"]
fn child() {
    let var = |name: &str| std::env::var(name).unwrap();
    let number = |name: &str| var(name).parse::<usize>().unwrap();
    let file = File::options().read(true).write(true).open(var("SEMMOE_TEST_MEMORY")).unwrap();
    let map = attach_memory(&file, SIGNAL_BYTES + BUFFER_BYTES).unwrap();
    let group = Group { file, map, world: number("SEMMOE_TEST_WORLD") };
    let mut comm = group.comm(number("SEMMOE_TEST_RANK"), PATIENCE).unwrap();
    match var("SEMMOE_TEST_TASK").as_str() {
        "shuffle" => shuffle(&mut comm),
        "die" => {
            comm.barrier().unwrap();
            // Like a killed process: nothing is dropped or announced.
            std::process::abort();
        }
        task => panic!("no task {task}"),
    }
}

fn start(group: &Group, rank: usize, task: &str) -> Child {
    let memory = format!("/proc/{}/fd/{}", std::process::id(), group.file.as_raw_fd());
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--ignored", "--quiet"])
        .envs([
            ("SEMMOE_TEST_MEMORY", memory),
            ("SEMMOE_TEST_WORLD", group.world.to_string()),
            ("SEMMOE_TEST_RANK", rank.to_string()),
            ("SEMMOE_TEST_TASK", task.to_owned()),
        ])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// SRS, then SAG; every rank gets the all-reduced rows.
fn shuffle(comm: &mut Communicator) {
    let rank = comm.rank().index();
    let data: Vec<Vec<bf16>> = (0..WORLD).map(|rank| values(TOKENS * HIDDEN, rank as u64)).collect();
    let destinations: Vec<u16> = (0..TOKENS).map(|token| (token * 5 % WORLD) as u16).collect();
    let order = order(&destinations, WORLD);
    let split = RowSplit::from(&order);
    let part = Span::new(0, TOKENS * HIDDEN).unwrap();
    let whole = Span::new(part.next(), TOKENS * HIDDEN).unwrap();
    let mut rows = vec![bf16::ZERO; split.positions(rank).len() * HIDDEN];
    for _ in 0..20 {
        comm.view_mut(part).unwrap().copy_from_slice(&data[rank]);
        comm.reduce_scatter(part, HIDDEN, split, &mut rows).unwrap();
        comm.allgather(&rows, HIDDEN, split, whole).unwrap();
        assert_eq!(comm.view(whole).unwrap(), reference::all_reduce(&slices(&data)).unwrap());
    }
}

#[test]
fn processes_do_what_threads_do() {
    let shared = Group::create(WORLD);
    let children: Vec<Child> = (1..WORLD).map(|rank| start(&shared, rank, "shuffle")).collect();
    shuffle(&mut shared.comm(0, PATIENCE).unwrap());
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
}

#[test]
fn a_process_that_died_is_named() {
    let shared = Group::create(2);
    let mut child = start(&shared, 1, "die");
    let mut comm = shared.comm(0, Duration::from_secs(30)).unwrap();
    comm.barrier().unwrap();
    assert!(!child.wait().unwrap().success());
    drop(comm);
    // Its rank stays taken, even for this process: a new group is needed.
    assert_eq!(shared.comm(1, PATIENCE).err(), Some(RankError::Joined { rank: RankId::new(1) }));

    let shared = Group::create(2);
    let mut alone = shared.comm(0, Duration::from_millis(50)).unwrap();
    let limit = Duration::from_millis(50);
    assert_eq!(alone.barrier(), Err(RankError::TimedOut { rank: RankId::new(1), epoch: 1, limit }));
}

#[test]
fn memory_that_may_not_do_is_refused() {
    let plain = rustix::fs::memfd_create("plain", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    let plain = File::from(plain);
    let attach = |least| attach_memory(&plain, least).unwrap_err().to_string();
    assert!(attach(1).contains("can be truncated"));
    plain.set_len(4096).unwrap();
    rustix::fs::fcntl_add_seals(&plain, rustix::fs::SealFlags::SHRINK).unwrap();
    assert!(attach(4097).contains("the file has 4096 bytes, expected at least 4097"));
    let error = threads(2, usize::MAX, PATIENCE).unwrap_err();
    assert!(matches!(error, RankError::TooLarge { .. }), "{error}");
}
