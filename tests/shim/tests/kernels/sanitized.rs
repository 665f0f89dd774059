//! Repeats the tests with the kernels built for the address and undefined-behaviour sanitizers.
//!
//! The sanitizers' library must be the first one in a process, so this test starts its own binary again with it
//! preloaded.

use std::path::{Path, PathBuf};
use std::process::Command;

use semmoe_kernels_shim::{Compiler, Sanitize};

use crate::support::{SANITIZED, shim};

/// The sanitizers' libraries; `None`, with a notice, if the compiler has none.
fn libraries() -> Option<Vec<PathBuf>> {
    let compiler = Compiler::find()?;
    let found: Option<Vec<PathBuf>> = ["libasan.so", "libubsan.so"].iter().map(|name| compiler.library(name)).collect();
    if found.is_none() {
        eprintln!("notice: the C++ compiler has no sanitizers, so the kernels are not run under them");
    }
    found
}

fn run_again(kernels: &Path, preload: &[PathBuf], tests: &[&str]) -> (bool, String) {
    let preload: Vec<String> = preload.iter().map(|path| path.display().to_string()).collect();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(tests)
        .arg("--include-ignored")
        .env("LD_PRELOAD", preload.join(":"))
        .env(SANITIZED, kernels)
        // Leaks are the harness's own; fibers' stacks are switched, not returned from.
        .env("ASAN_OPTIONS", "detect_leaks=0:abort_on_error=0:exitcode=99")
        .output()
        .unwrap();
    let text = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    (output.status.success(), text)
}

#[test]
fn the_kernels_are_clean_under_the_sanitizers_which_see_one_byte_past_the_end() {
    if std::env::var_os(SANITIZED).is_some() {
        return;
    }
    let (Some(compiler), Some(libraries)) = (Compiler::find(), libraries()) else { return };
    let folder = tempfile::tempdir().unwrap();
    let kernels = compiler.compile(folder.path(), Sanitize::AddressAndUndefined).unwrap();
    let tests = ["collectives::", "compute::", "exchange::", "sort::", "hostile::", "unit::"];
    let (clean, text) = run_again(&kernels, &libraries, &tests);
    assert!(clean, "{text}");
    // A filter that matches no test would also pass.
    let passed = text.split(" passed").next().and_then(|before| before.rsplit(' ').next()?.parse::<u32>().ok());
    assert!(passed.is_some_and(|passed| passed >= 40), "{passed:?} tests were run: {text}");
    let (clean, text) = run_again(&kernels, &libraries, &["--exact", "sanitized::reads_past_the_end"]);
    assert!(!clean && text.contains("heap-buffer-overflow"), "{text}");
}

/// Run only by the test above: the call states a part longer than it is.
#[test]
#[ignore = "a planted defect"]
fn reads_past_the_end() {
    use crate::support::{Run, World, poisoned, run_all};
    use semmoe_kernels::Dtype;
    use semmoe_kernels_cuda::{Buffer, Grid, ReduceScatter, RowOrder, Rows, Split};
    use semmoe_kernels_shim::Step;

    let Some(shim) = shim() else { return };
    let world = World::new(1);
    let (parts, out) = (poisoned::<f32>(1, 15), poisoned::<f32>(1, 16));
    let call = ReduceScatter {
        parts: &[Buffer { bytes: 64, ..parts[0].buffer() }],
        out: &[out[0].buffer()],
        order: RowOrder {
            rows: Rows { tokens: 2, hidden: 8, dtype: Dtype::F32 },
            split: Split::default(),
            capacity: 2,
            multicast: None,
        },
    };
    let launch = call.launch(&world.team(0).unwrap(), Grid { blocks: 1, threads: 32 }).unwrap();
    run_all(shim, &[vec![Step::Launch(&launch)]], Run::of(1), &world).unwrap();
}
