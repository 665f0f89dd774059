//! Checkpoints damaged at random: an error or a verified copy, never a panic, and never an output that looks complete
//! after an error.

use std::path::Path;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::folder::{Folder, tables};
use proptest::prelude::*;
use semmoe_tables::permute::permute;

/// Damage to a file.
#[derive(Clone, Debug)]
enum Damage {
    Cut(prop::sample::Index),
    Flip(prop::sample::Index, u8),
    /// A digit or bracket of the JSON at the front becomes another character.
    Text(prop::sample::Index, u8),
    Grow(Vec<u8>),
    /// The length of the header.
    Length(u64),
}

fn damage() -> impl Strategy<Value = Damage> {
    prop_oneof![
        any::<prop::sample::Index>().prop_map(Damage::Cut),
        (any::<prop::sample::Index>(), 1..=255u8).prop_map(|(at, bits)| Damage::Flip(at, bits)),
        (any::<prop::sample::Index>(), prop::sample::select(b"0129[]{},:\"-. x".to_vec()))
            .prop_map(|(at, byte)| Damage::Text(at, byte)),
        prop::collection::vec(any::<u8>(), 1..20).prop_map(Damage::Grow),
        prop_oneof![any::<u64>(), 0..100_000u64, Just(u64::MAX - 7)].prop_map(Damage::Length),
    ]
}

fn apply(damage: &Damage, path: &Path) {
    let mut bytes = std::fs::read(path).unwrap();
    let json = bytes.iter().enumerate().filter(|(_, b)| b"0123456789[]{},:\"".contains(b)).map(|(at, _)| at);
    let json: Vec<usize> = json.take(4000).collect();
    match damage {
        Damage::Cut(at) => bytes.truncate(at.index(bytes.len())),
        Damage::Flip(at, bits) => {
            let at = at.index(bytes.len());
            bytes[at] ^= bits;
        }
        Damage::Text(at, byte) => bytes[json[at.index(json.len())]] = *byte,
        Damage::Grow(more) => bytes.extend(more),
        Damage::Length(length) => bytes[..8].copy_from_slice(&length.to_le_bytes()),
    }
    std::fs::write(path, bytes).unwrap();
}

fn small(family: usize) -> Checkpoint {
    let all = [Checkpoint::qwen3, Checkpoint::deepseek_v3, Checkpoint::mixtral, || Checkpoint::gpt_oss(true)];
    all[family % all.len()]().sharded(2)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn damaged_sources(family in 0usize..4, file in 0usize..4, damage in damage()) {
        let checkpoint = small(family);
        let folder = Folder::of(&checkpoint);
        let file = match file {
            0 => "config.json".to_owned(),
            1 => "model.safetensors.index.json".to_owned(),
            n => checkpoint.file_of(n - 2),
        };
        apply(&damage, &folder.source().join(&file));
        let result = permute(&tables(2), &folder.source(), &folder.out(), &mut |_, _| {});
        match result {
            Ok(_) => prop_assert!(folder.out().join("config.json").exists()),
            Err(error) => {
                let error = error.to_string();
                prop_assert!(!error.contains('\n') && error.len() < 1000, "{}", error);
                prop_assert!(!folder.out().join("config.json").exists(), "{}", error);
            }
        }
    }

    #[test]
    fn damaged_outputs_are_not_taken_over(family in 0usize..4, shard in 0usize..2, damage in damage()) {
        let checkpoint = small(family);
        let folder = Folder::of(&checkpoint);
        folder.permute(&tables(2)).unwrap();
        let path = folder.out().join(checkpoint.file_of(shard));
        let whole = std::fs::read(&path).unwrap();
        std::fs::remove_file(folder.out().join("config.json")).unwrap();
        apply(&damage, &path);
        let result = permute(&tables(2), &folder.source(), &folder.out(), &mut |_, _| {});
        // The damage may not have changed anything.
        let same = std::fs::read(&path).unwrap() == whole;
        prop_assert_eq!(result.is_ok(), same, "{:?}", result);
        prop_assert_eq!(folder.out().join("config.json").exists(), same);
    }
}
