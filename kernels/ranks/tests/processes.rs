//! Ranks as processes over shared memory. This program starts itself again for the other ranks.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::{PATIENCE, order, slices, values};
use half::bf16;
use semmoe_kernels::{RowSplit, reference};
use semmoe_ranks::{Member, RankError, Shared, Span};
use semmoe_tables::RankId;

const WORLD: usize = 4;
const TOKENS: usize = 37;
const HIDDEN: usize = 19;

/// `child` of this program: the path of the memory, the rank and what to do are in the environment.
#[test]
#[ignore = "a part of the other tests, which start it"]
fn child() {
    let var = |name: &str| std::env::var(name).unwrap();
    let file = File::options().read(true).write(true).open(var("SEMMOE_TEST_MEMORY")).unwrap();
    // SAFETY: the file is the parent's group, used by members only.
    let shared = unsafe { Shared::attach(file) }.unwrap();
    let mut member = shared.member(var("SEMMOE_TEST_RANK").parse().unwrap(), PATIENCE).unwrap();
    match var("SEMMOE_TEST_TASK").as_str() {
        "shuffle" => shuffle(&mut member),
        "die" => {
            member.barrier().unwrap();
            // As a killed process: nothing is dropped, nobody is told.
            std::process::abort();
        }
        task => panic!("no task {task}"),
    }
}

fn start(shared: &Shared, rank: usize, task: &str) -> Child {
    let memory = format!("/proc/{}/fd/{}", std::process::id(), shared.file().as_raw_fd());
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--ignored", "--quiet"])
        .envs([
            ("SEMMOE_TEST_MEMORY", memory),
            ("SEMMOE_TEST_RANK", rank.to_string()),
            ("SEMMOE_TEST_TASK", task.to_owned()),
        ])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// SRS, then SAG; every rank sees the all-reduced rows.
fn shuffle(member: &mut Member) {
    let rank = member.rank().index();
    let data: Vec<Vec<bf16>> = (0..WORLD).map(|rank| values(TOKENS * HIDDEN, rank as u64)).collect();
    let destinations: Vec<u16> = (0..TOKENS).map(|token| (token * 5 % WORLD) as u16).collect();
    let order = order(&destinations, WORLD);
    let split = RowSplit::from(&order);
    let part = Span::new(0, TOKENS * HIDDEN).unwrap();
    let whole = Span::new(part.next(), TOKENS * HIDDEN).unwrap();
    let mut rows = vec![bf16::ZERO; split.positions(rank).len() * HIDDEN];
    for _ in 0..20 {
        member.view_mut(part).unwrap().copy_from_slice(&data[rank]);
        member.reduce_scatter(part, HIDDEN, split, &mut rows).unwrap();
        member.allgather(&rows, HIDDEN, split, whole).unwrap();
        assert_eq!(member.view(whole).unwrap(), reference::all_reduce(&slices(&data)).unwrap());
    }
}

#[test]
fn processes_do_what_threads_do() {
    let shared = Shared::create(WORLD, 1 << 16).unwrap();
    let children: Vec<Child> = (1..WORLD).map(|rank| start(&shared, rank, "shuffle")).collect();
    shuffle(&mut shared.member(0, PATIENCE).unwrap());
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
}

#[test]
fn a_process_that_died_is_named() {
    let shared = Shared::create(2, 4096).unwrap();
    let mut child = start(&shared, 1, "die");
    let mut member = shared.member(0, Duration::from_secs(30)).unwrap();
    member.barrier().unwrap();
    assert!(!child.wait().unwrap().success());
    drop(member);
    // Its rank stays taken, also for this process: a new group is needed.
    assert_eq!(shared.member(1, PATIENCE).err(), Some(RankError::Joined { rank: RankId::new(1) }));

    let shared = Shared::create(2, 4096).unwrap();
    let mut alone = shared.member(0, Duration::from_millis(50)).unwrap();
    let limit = Duration::from_millis(50);
    assert_eq!(alone.barrier(), Err(RankError::TimedOut { rank: RankId::new(1), epoch: 1, limit }));
}

#[test]
fn memory_that_is_no_group_is_refused() {
    let attach = |file: &File| {
        // SAFETY: nobody else has the file.
        unsafe { Shared::attach(file.try_clone().unwrap()) }.unwrap_err().to_string()
    };
    let plain = rustix::fs::memfd_create("plain", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    let mut plain = File::from(plain);
    assert!(attach(&plain).contains("can be cut short"));
    plain.write_all(&[1; 8192]).unwrap();
    rustix::fs::fcntl_add_seals(&plain, rustix::fs::SealFlags::SHRINK).unwrap();
    assert!(attach(&plain).contains("it begins with 0x101010101010101"));
    let shared = Shared::create(2, 4096).unwrap();
    let longer = File::from(rustix::fs::memfd_create("longer", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap());
    let mut header = [0u8; 32];
    std::os::unix::fs::FileExt::read_exact_at(shared.file(), &mut header, 0).unwrap();
    for (world, bytes, expected) in [(2u64, 4096u64, "expected"), (0, 4096, "0 ranks"), (2, u64::MAX, "at most")] {
        header[16..24].copy_from_slice(&world.to_le_bytes());
        header[24..32].copy_from_slice(&bytes.to_le_bytes());
        let _ = longer.set_len(100_000);
        std::os::unix::fs::FileExt::write_all_at(&longer, &header, 0).unwrap();
        let _ = rustix::fs::fcntl_add_seals(&longer, rustix::fs::SealFlags::SHRINK);
        let found = attach(&longer);
        assert!(found.contains(expected), "{found}");
    }
}
