# The everyday commands; `.ci/run` calls the same ones.

# Serve the bundled model over four ranks and the gateway.
up *ARGS:
    cargo run --release -- up {{ARGS}}

# All tests.
test:
    cargo test --workspace

# Format, lints, documentation.
check:
    cargo fmt --all --check
    cargo clippy --workspace --all-targets -- -D warnings
    RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps

# A wheel and a tarball in dist/.
package:
    cargo build --release --locked --features kube,cuda
    deploy/package target/release/semmoe dist

# What CI runs.
ci:
    bash .ci/run
