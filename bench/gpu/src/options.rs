//! The program's options.

pub(crate) const USAGE: &str = "\
usage: semmoe-bench-gpu COMMAND [--cpu] [--small] [--seed N] [--kernel NAME] [--vmm]
  check       kernels against the CPU reference
  processes   two processes that map each other's memory: by cuIpc, or with --vmm by file descriptors
  unit        the interface that workers call, with a thread and a stream per rank; GPU only
  times       kernels and their baselines, by events
  planted     a kernel that reads past its memory, for compute-sanitizer to find
  predict     a model's times for GPUs joined by links
  --cpu       run on the CPU, through the shim
  --small     use small sizes and few blocks, for the shim and for compute-sanitizer";

/// Kernels by the name that `--kernel` takes.
pub(crate) const KERNELS: [&str; 13] = [
    "argsort",
    "srs",
    "reduce-scatter",
    "srs-norm",
    "sag",
    "allgather",
    "all-reduce",
    "shuffle",
    "dispatch-combine",
    "reshard",
    "nvls",
    "matmul",
    "attend",
];

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Command {
    Check,
    Processes,
    /// One rank of `processes`; arguments from its parent.
    Rank(Vec<String>),
    Times,
    Unit,
    Planted,
    Predict,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Options {
    pub(crate) command: Command,
    pub(crate) cpu: bool,
    pub(crate) small: bool,
    pub(crate) vmm: bool,
    /// Seed of all random data, printed with the results so that failures can be reproduced.
    pub(crate) seed: u64,
    /// Check only this kernel.
    pub(crate) kernel: Option<String>,
}

impl Options {
    pub(crate) fn parse(arguments: &[String]) -> Result<Self, String> {
        let (name, rest) = arguments.split_first().ok_or("expected a command")?;
        let command = match name.as_str() {
            "check" => Command::Check,
            "processes" => Command::Processes,
            "rank" => Command::Rank(Vec::new()),
            "times" => Command::Times,
            "unit" => Command::Unit,
            "planted" => Command::Planted,
            "predict" => Command::Predict,
            other => return Err(format!("unknown command {other}; run without arguments for usage")),
        };
        let mut options = Self { command, cpu: false, small: false, vmm: false, seed: 1, kernel: None };
        let mut rest = rest.iter();
        while let Some(argument) = rest.next() {
            let mut value = || rest.next().ok_or_else(|| format!("{argument} needs a value"));
            match (argument.as_str(), &mut options.command) {
                ("--cpu", _) => options.cpu = true,
                ("--small", _) => options.small = true,
                ("--vmm", _) => options.vmm = true,
                ("--seed", _) => options.seed = number(value()?)?,
                ("--kernel", _) => options.kernel = Some(kernel(value()?)?),
                (_, Command::Rank(reported)) => reported.push(argument.clone()),
                (other, _) => return Err(format!("unknown option {other}; run without arguments for usage")),
            }
        }
        Ok(options)
    }
}

fn number(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("--seed is {text}, expected a number"))
}

fn kernel(name: &str) -> Result<String, String> {
    match KERNELS.contains(&name) {
        true => Ok(name.to_owned()),
        false => Err(format!("unknown kernel {name}, expected one of {}", KERNELS.join(", "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options, String> {
        Options::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn options_are_read_and_wrong_ones_refused() {
        let options = parse("check --small --seed 7 --kernel srs-norm").unwrap();
        assert_eq!((options.seed, options.small, options.cpu), (7, true, false));
        assert_eq!(options.kernel.as_deref(), Some("srs-norm"));
        assert_eq!(parse("rank 1 2 --cpu").unwrap().command, Command::Rank(vec!["1".to_owned(), "2".to_owned()]));
        for wrong in ["", "chck", "check --fast", "check --seed", "check --seed x", "check --kernel nothing"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
