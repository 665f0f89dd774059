//! Every law on its seeds: whole, truncated and with changed bytes.

use std::path::PathBuf;

use proptest::prelude::*;
use semmoe_fuzz::TARGETS;

fn seeds(target: &str) -> Vec<Vec<u8>> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("seeds").join(target);
    let mut files: Vec<PathBuf> =
        folder.read_dir().expect("a folder of seeds").map(|file| file.expect("a seed").path()).collect();
    files.sort();
    files.iter().map(|file| std::fs::read(file).expect("a readable seed")).collect()
}

#[test]
fn laws_hold_on_seeds() {
    for (name, law) in TARGETS {
        let seeds = seeds(name);
        assert!(!seeds.is_empty(), "{name} has no seeds");
        seeds.iter().for_each(|seed| law(seed));
        law(&[]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn laws_hold_on_changed_seeds(
        target in 0..TARGETS.len(), which in any::<prop::sample::Index>(), keep in 0.0..1.2,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
    ) {
        let (name, law) = TARGETS[target];
        let seeds = seeds(name);
        let mut seed = which.get(&seeds).clone();
        seed.truncate((seed.len() as f64 * keep) as usize);
        for (at, byte) in changes {
            if !seed.is_empty() {
                let at = at.index(seed.len());
                seed[at] = byte;
            }
        }
        law(&seed);
    }

    #[test]
    fn laws_hold_on_any_bytes(target in 0..TARGETS.len(), bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        (TARGETS[target].1)(&bytes);
    }
}
