//! The build details that `semmoe --version` prints: commit, features, target.

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=SEMMOE_COMMIT");
    let target = std::env::var("TARGET").unwrap_or_default();
    let features: Vec<&str> = ["cuda", "jemalloc", "kube"]
        .into_iter()
        .filter(|name| std::env::var_os(format!("CARGO_FEATURE_{}", name.to_uppercase())).is_some())
        .collect();
    let features = if features.is_empty() { "none".to_owned() } else { features.join(" ") };
    println!("cargo::rustc-env=CLI_COMMIT={}", commit());
    println!("cargo::rustc-env=CLI_FEATURES={features}");
    println!("cargo::rustc-env=CLI_TARGET={target}");
}

/// The checked-out commit. Development builds omit it, as they would otherwise be rebuilt after every commit.
fn commit() -> String {
    if let Ok(commit) = std::env::var("SEMMOE_COMMIT") {
        return commit;
    }
    if std::env::var("PROFILE").as_deref() != Ok("release") {
        return "of a development build".to_owned();
    }
    // The reflog changes with every commit and checkout, in worktrees too.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo::rerun-if-changed={log}");
    }
    git(&["rev-parse", "--short=12", "HEAD"]).unwrap_or_else(|| "unknown".to_owned())
}

fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}
