//! Archives that try something.

use proptest::prelude::*;
use semmoe_profiler::pickle::{NpzFile, Source, TorchFile, read_npy};

use super::build::{Entry, Lies, pickle, pt, storage, stored, tensor, tuple, zip};
use super::{data, open, refused};

#[test]
fn entries_are_stored_whole_and_apart() {
    let none = pickle(&[b"N"]);
    assert!(open(pt(&none, &[])).is_ok());
    let lying = |lies: Lies, method: u16| {
        zip(&[stored("a/data.pkl", &none), Entry { name: "a/data/0", bytes: &[0; 64], method, lies }])
    };
    refused(lying(Lies::default(), 8), &["compressed"]);
    refused(lying(Lies { length: Some(65), ..Lies::default() }, 0), &["ends before the next begins"]);
    refused(lying(Lies { length: Some(u32::MAX - 1), ..Lies::default() }, 0), &["ends before the next begins"]);
    // Two names for the same bytes: a small file would count as a large one.
    refused(lying(Lies { header: Some(0), ..Lies::default() }, 0), &["without a header"]);
    let twice = [
        stored("a/data/1", &[0; 64]),
        Entry { name: "a/data/0", bytes: &[0; 64], method: 0, lies: Lies { header: Some(0), ..Lies::default() } },
    ];
    refused(zip(&twice), &["ends before the next begins"]);
    refused(lying(Lies { header: Some(u32::MAX - 1), ..Lies::default() }, 0), &["an entry's header ends"]);
    refused(zip(&[stored("a/data.pkl", &none), stored("a/data.pkl", &none)]), &["twice"]);
    refused(zip(&[stored("a/data.pkl", &none), stored("b/data.pkl", &none)]), &["several folders"]);
    refused(zip(&[stored("data.pkl", &none)]), &["no `data.pkl`"]);
    refused(zip(&[stored("a/data.pkl", &none), stored("a/byteorder", b"big")]), &["byte order is big"]);
    assert!(open(zip(&[stored("a/data.pkl", &none), stored("a/byteorder", b"little")])).is_ok());
}

#[test]
fn the_end_is_at_the_end() {
    let whole = pt(&pickle(&[b"N"]), &[1; 8]);
    for cut in 0..whole.len() {
        assert!(open(whole[..cut].to_vec()).is_err(), "cut at {cut}");
    }
    refused([&whole[..], b"more"].concat(), &["it may have been cut"]);
    refused(Vec::new(), &["an empty file"]);
    refused(b"\x80\x02N.".to_vec(), &["a bare pickle"]);
    let at = whole.len() - 22;
    let with = |from: usize, bytes: &[u8]| {
        let mut changed = whole.clone();
        changed[at + from..][..bytes.len()].copy_from_slice(bytes);
        changed
    };
    refused(with(4, &[1]), &["one of several"]);
    refused(with(10, &[3]), &["directory"]);
    refused(with(10, &[1]), &["directory"]);
    refused(with(12, &[0xff, 0xff, 0xff, 0x7f]), &["directory"]);
    refused(with(16, &[0xff, 0xff, 0xff, 0x7f]), &["directory"]);
    refused(with(16, &[0xff; 4]), &["64-bit end is missing"]);
    refused(with(10, &[0xff; 2]), &["64-bit end is missing"]);
}

#[test]
fn tensors_that_share_bytes_are_read_once_in_all() {
    let one = tensor(&storage("ByteStorage", 4000), 0, &tuple(&[4000]), &tuple(&[1]));
    let many = [b"(", &one.repeat(20)[..], b"t"].concat();
    let file = open(pt(&pickle(&[&many]), &[0; 4000])).unwrap();
    let items = file.document().items(file.document().root()).unwrap();
    let read = items.iter().take_while(|item| file.array(**item).is_ok()).count();
    assert!((1..20).contains(&read), "{read} of 20 reads of the same bytes");
    assert!(file.array(items[19]).unwrap_err().to_string().contains("more than"));
}

/// An entry of an archive larger than 4 GiB keeps its sizes elsewhere; here the form alone.
#[test]
fn the_64_bit_form_is_read() {
    let none = pickle(&[b"N"]);
    let plain = pt(&none, &[]);
    let at = plain.len() - 22;
    let size = u64::from(u32::from_le_bytes(plain[at + 12..at + 16].try_into().unwrap()));
    let from = u64::from(u32::from_le_bytes(plain[at + 16..at + 20].try_into().unwrap()));
    let end = [
        &b"PK\x06\x06"[..],
        &44u64.to_le_bytes(),
        &[45, 0, 45, 0],
        &[0; 8],
        &2u64.to_le_bytes(),
        &2u64.to_le_bytes(),
        &size.to_le_bytes(),
        &from.to_le_bytes(),
    ]
    .concat();
    let locator = [&b"PK\x06\x07\0\0\0\0"[..], &(at as u64).to_le_bytes(), &[1, 0, 0, 0]].concat();
    let tail = [&b"PK\x05\x06\0\0\0\0"[..], &[0xff; 12], &[0, 0]].concat();
    let wide = [&plain[..at], &end, &locator, &tail].concat();
    assert!(open(wide.clone()).is_ok());
    let mut lying = wide;
    let length = lying.len();
    lying[length - 22 - 20 + 8..][..8].copy_from_slice(&u64::MAX.to_le_bytes());
    refused(lying, &["64-bit end is missing"]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn real_files_with_changed_bytes_are_read_or_refused(
        which in 0usize..6, keep in 0.0..1.3, changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
    ) {
        let name = ["views.pt", "per_token_0.pt", "stat.pt", "routes.npz", "logcnt.npy", "views_protocol_4.pt"][which];
        let mut bytes = std::fs::read(data(name)).unwrap();
        bytes.truncate((bytes.len() as f64 * keep) as usize);
        for (at, byte) in changes {
            if !bytes.is_empty() {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
        }
        if let Ok(file) = TorchFile::from_source(Source::from_bytes(bytes.clone())) {
            prop_assert!(file.document().tensors().len() <= bytes.len());
        }
        if let Ok(file) = NpzFile::from_source(Source::from_bytes(bytes.clone())) {
            let _ = (file.array("token_ids"), file.array("experts"));
        }
        let _ = read_npy(&Source::from_bytes(bytes));
    }
}
