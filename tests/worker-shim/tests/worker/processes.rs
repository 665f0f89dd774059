//! Units of several processes, each with a GPU: ranks reach each other's memory by handles.

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};

use semmoe_kernels_shim::Shim;
use semmoe_tables::Attention;
use semmoe_worker::WorkerEvent;

use super::client::Client;
use super::serving::{GREEDY, Unit, prompts, served_fixture};
use semmoe_worker_shim::{ProcessStart, shim};

/// A serving unit of several processes. They exit when their standard input closes, also if a test fails.
struct Processes {
    client: Client,
    children: Vec<Child>,
}

/// The processes of a unit.
#[derive(Clone, Copy)]
struct Split {
    world: u16,
    /// Ranks of each process.
    here: u16,
}

fn start_of(shim: &Shim, Split { world, here }: Split, attention: Attention) -> ProcessStart {
    ProcessStart {
        kernels: shim.path().to_owned(),
        model: Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny-qwen3moe-15m"),
        rank: 0,
        world,
        here,
        attention: vec![attention],
        rendezvous: ([127, 0, 0, 1], 0).into(),
        place: None,
        allocates_late: false,
    }
}

fn spawn(start: &ProcessStart) -> (Child, BufReader<ChildStdout>) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shim-ranks"));
    command.arg(serde_json::to_string(start).unwrap());
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let output = BufReader::new(child.stdout.take().unwrap());
    (child, output)
}

/// The next event; `None` if the process has closed its output.
fn event(output: &mut BufReader<ChildStdout>) -> Option<WorkerEvent> {
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    (!line.is_empty()).then(|| serde_json::from_str(&line).unwrap())
}

/// Waits for a process; returns its messages too.
fn ended(child: &mut Child) -> (ExitStatus, String) {
    let mut messages = String::new();
    child.stderr.take().unwrap().read_to_string(&mut messages).unwrap();
    (child.wait().unwrap(), messages)
}

impl Processes {
    /// Starts the first process, then the others once its address is known. `adjust` gets the number of a process.
    fn spawn(start: &ProcessStart, adjust: impl Fn(&mut ProcessStart, u16)) -> (Vec<Child>, BufReader<ChildStdout>) {
        let of = |process: u16, rendezvous| {
            let mut start = ProcessStart { rank: process * start.here, rendezvous, ..start.clone() };
            adjust(&mut start, process);
            spawn(&start)
        };
        let (first, mut output) = of(0, start.rendezvous);
        let Some(WorkerEvent::Bound { rendezvous }) = event(&mut output) else { panic!("rank 0 does not bind") };
        let others = (1..start.world / start.here).map(|process| of(process, rendezvous).0);
        (std::iter::once(first).chain(others).collect(), output)
    }

    fn start(start: &ProcessStart) -> Self {
        let (mut children, mut output) = Self::spawn(start, |_, _| {});
        let http = loop {
            match event(&mut output) {
                Some(WorkerEvent::Ready { http: Some(http), .. }) => break http,
                Some(_) => {}
                None => panic!("the unit did not start: {:?}", children.iter_mut().map(ended).collect::<Vec<_>>()),
            }
        };
        Self { client: Client(http), children }
    }

    fn stop(mut self) {
        drop(self.children[0].stdin.take());
        for child in &mut self.children {
            let (status, messages) = ended(child);
            assert!(status.success(), "{status}: {messages}");
        }
    }
}

#[test]
fn processes_with_a_gpu_each_answer_as_one_on_cpus() {
    let Some(shim) = shim() else { return };
    let dir = served_fixture();
    // The last one fills more than one page, and more than one step.
    let prompts = ["[5, 9, 20, 31]".to_owned(), "[77]".to_owned(), format!("{:?}", (1..=90).collect::<Vec<u32>>())];
    let greedy = format!(r#"{GREEDY}, "ignore_eos": true"#);
    let cpu = Unit::start_with(None, 1, |config| config.model_dir = dir.path().to_owned());
    let expected = cpu.client.continued(&prompts, &greedy);
    cpu.stop();
    let splits = [Split { world: 2, here: 1 }, Split { world: 4, here: 2 }];
    for (split, attention) in splits.into_iter().flat_map(|split| [(split, Attention::Dp), (split, Attention::Tp)]) {
        let (start, Split { world, here }) = (start_of(shim, split, attention), split);
        let unit = Processes::start(&ProcessStart { model: dir.path().to_owned(), ..start });
        assert_eq!(unit.client.continued(&prompts, &greedy), expected, "{here} of {world} ranks, {attention}");
        unit.stop();
    }
}

/// A switch maps experts, keys and values of the other process.
#[test]
fn processes_with_a_gpu_each_switch_in_mid_request() {
    const TOKENS: usize = 150;
    let Some(shim) = shim() else { return };
    let dir = served_fixture();
    let prompt = [format!("{:?}", (0..70).collect::<Vec<u32>>())];
    let greedy = format!(r#"{GREEDY}, "ignore_eos": true"#);
    let cpu = Unit::start_with(None, 1, |config| config.model_dir = dir.path().to_owned());
    let expected = cpu.client.continued_by(TOKENS, &prompt, &greedy);
    cpu.stop();
    let start = start_of(shim, Split { world: 2, here: 1 }, Attention::Dp);
    let (model, attention) = (dir.path().to_owned(), vec![Attention::Dp, Attention::Tp]);
    let unit = Processes::start(&ProcessStart { model, attention, ..start });
    assert_eq!(unit.client.continued_through_switches(TOKENS, &prompt, &greedy), expected);
    assert_eq!(unit.client.continued_by(TOKENS, &prompt, &greedy), expected);
    unit.stop();
}

#[test]
fn a_killed_process_ends_the_unit_with_its_rank_as_the_cause() {
    let Some(shim) = shim() else { return };
    for attention in [Attention::Dp, Attention::Tp] {
        let mut unit = Processes::start(&start_of(shim, Split { world: 2, here: 1 }, attention));
        unit.client.continued(&prompts()[..1], GREEDY);
        let (status, answer) = std::thread::scope(|scope| {
            let body = r#"{"input_ids": [5, 9], "sampling_params": {"max_new_tokens": 900, "ignore_eos": true}}"#;
            let request = scope.spawn(|| unit.client.ask("POST", "/generate", body));
            unit.client.wait_until_busy();
            unit.children[1].kill().unwrap();
            request.join().unwrap()
        });
        assert!(status >= 500 && answer.contains("rank 1 was lost"), "{status}: {answer}");
        let (status, messages) = ended(&mut unit.children[0]);
        assert!(status.code() == Some(3) && messages.contains("rank 1 was lost"), "{status}: {messages}");
    }
}

#[test]
fn a_process_that_allocates_during_a_step_ends_the_unit() {
    let Some(shim) = shim() else { return };
    let start = start_of(shim, Split { world: 2, here: 1 }, Attention::Tp);
    let mut unit = Processes::start(&ProcessStart { allocates_late: true, ..start });
    let body = r#"{"input_ids": [5, 9], "sampling_params": {"max_new_tokens": 4}}"#;
    let (status, answer) = unit.client.ask("POST", "/generate", body);
    assert!(status >= 500 && answer.contains("allocated after the first collective"), "{status}: {answer}");
    assert_eq!(ended(&mut unit.children[0]).0.code(), Some(3));
}

/// The processes of a unit that does not form, and their messages.
fn refused(start: &ProcessStart, adjust: impl Fn(&mut ProcessStart, u16)) -> Vec<(Option<i32>, String)> {
    let (mut children, mut output) = Processes::spawn(start, adjust);
    while let Some(event) = event(&mut output) {
        assert!(!matches!(event, WorkerEvent::Ready { .. }), "the unit has formed");
    }
    let outcome = |child: &mut Child| {
        let (status, messages) = ended(child);
        (status.code(), messages)
    };
    children.iter_mut().map(outcome).collect()
}

#[test]
fn ranks_of_several_hosts_and_unequal_processes_are_refused() {
    let Some(shim) = shim() else { return };
    let start = start_of(shim, Split { world: 2, here: 1 }, Attention::Dp);
    let other_host = refused(&start, |start, process| start.place = (process == 1).then(|| "another host".to_owned()));
    for (code, messages) in other_host {
        assert!(code == Some(2) && messages.contains("not supported between hosts (NVLink domains"), "{messages}");
    }
    let start = start_of(shim, Split { world: 4, here: 2 }, Attention::Dp);
    let unequal = refused(&start, |start, process| start.here = 2 - process);
    let (code, messages) = &unequal[0];
    assert!(*code == Some(2) && messages.contains("computes on GPUs"), "{code:?}: {messages}");
}
