//! Pickles that try something.

use proptest::prelude::*;
use semmoe_profiler::pickle::{Value, read_pickle};

use super::build::{int, pickle, pt, storage, tensor, text, tuple};
use super::{open, refused};

/// Opcodes that are read; all others are refused by name.
const READ: &[u8] = b"(.NJKMGX})]tsaeuqrhjcRQ\x80\x95\x88\x89\x8a\x8c\x85\x86\x87\x94\x93";

#[test]
fn all_other_opcodes_are_refused_by_name() {
    for opcode in (0..=255u8).filter(|opcode| !READ.contains(opcode)) {
        // Whatever it would need lies on the stack.
        let bytes = pickle(&[b"(]}NN", &[opcode], b"aaaa\naaaa\n"]);
        let message = open(pt(&bytes, &[])).unwrap_err();
        assert!(message.contains("never executed here"), "{opcode:#x}: {message}");
        assert!(message.contains("at byte 7"), "{opcode:#x}: {message}");
    }
    for (opcode, name) in [
        (b'b', "BUILD"),
        (b'i', "INST"),
        (b'o', "OBJ"),
        (0x81, "NEWOBJ"),
        (0x82, "EXT1"),
        (b'P', "PERSID"),
        (0x97, "NEXT_BUFFER"),
    ] {
        refused(pt(&pickle(&[&[opcode]]), &[]), &[name]);
    }
    refused(pt(&pickle(&[&[0x01]]), &[]), &["without a name"]);
}

#[test]
fn other_names_are_refused_and_never_called() {
    for (module, name) in [
        ("os", "system"),
        ("posix", "system"),
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("torch", "load"),
        ("torch", "UntypedStorage"),
        ("torch._utils", "_rebuild_parameter"),
        ("torch.storage", "_load_from_bytes"),
        ("collections", "OrderedDict.fromkeys"),
        ("numpy.core.multiarray", "_reconstruct"),
    ] {
        let full = format!("{module}.{name}");
        let old = format!("c{module}\n{name}\n");
        refused(pt(&pickle(&[old.as_bytes(), b"(", &text("true"), b"tR"]), &[]), &[&full, "never imported here"]);
        let new = [&text(module)[..], &text(name), b"\x93)R"].concat();
        refused(pt(&pickle(&[&new]), &[]), &[&full, "never imported here"]);
    }
    refused(pt(&pickle(&[b"cos\nsys\x1b[2Jtem\n"]), &[]), &["sys\\u{1b}[2Jtem"]);
    refused(pt(&pickle(&[b"ctorch\nFloatStorage\n)R"]), &[]), &["only named"]);
    refused(pt(&pickle(&[b"ccollections\nOrderedDict\n]\x85R"]), &[]), &["without arguments"]);
    refused(pt(&pickle(&[b"K\x01)R"]), &[]), &["a name to call"]);
    refused(pt(&pickle(&[b"ccollections\nOrderedDict\nNR"]), &[]), &["a tuple of arguments"]);
    refused(pt(&pickle(&[b"cos"]), &[]), &["a line"]);
    refused(pt(&pickle(&[b"NN\x93"]), &[]), &["two texts"]);
}

#[test]
fn tensors_stay_within_their_storage() {
    let bytes = [7u8; 24];
    let longs = storage("LongStorage", 3);
    let with = |sizes: &[i64], strides: &[i64], offset| {
        pt(&pickle(&[&tensor(&longs, offset, &tuple(sizes), &tuple(strides))]), &bytes)
    };
    assert!(open(with(&[3], &[1], 0)).is_ok());
    assert!(open(with(&[2], &[2], 0)).is_ok());
    assert!(open(with(&[1, 3], &[9, 1], 0)).is_ok(), "the step of a single row does not matter");
    assert!(open(with(&[0, 1 << 40], &[1, 1], 0)).is_ok(), "empty");
    for (sizes, strides, offset, said) in [
        (&[4][..], &[1][..], 0, "within the 3 elements"),
        (&[3], &[1], 1, "within the 3 elements"),
        (&[2], &[3], 0, "within the 3 elements"),
        (&[2], &[-1], 1, "no negative number"),
        (&[-1], &[1], 0, "no negative number"),
        (&[3], &[1], -1, "no negative number"),
        (&[i64::MAX], &[1], 0, "within the 3 elements"),
        (&[i64::MAX, i64::MAX], &[1, 1], 0, "within the 3 elements"),
        (&[2], &[i64::MAX], 0, "within the 3 elements"),
        (&[2, 2], &[i64::MAX, i64::MAX], i64::MAX, "within the 3 elements"),
        // A few elements that would be read as many.
        (&[1 << 40], &[0], 0, "no repeated elements"),
        (&[2, 2, 2], &[1, 1, 0], 0, "no repeated elements"),
        (&[2, 2], &[1, 1], 0, "within the 3 elements"),
        (&[1, 2], &[1], 0, "one for each size"),
        (&[1; 9], &[1; 9], 0, "at most 8"),
    ] {
        refused(with(sizes, strides, offset), &[said]);
    }
}

#[test]
fn tensors_are_made_of_what_torch_makes_them_of() {
    let bytes = [7u8; 24];
    let longs = storage("LongStorage", 3);
    let ones = tuple(&[1]);
    let nan = [b"G", &f64::NAN.to_be_bytes()[..], b"\x85"].concat();
    refused(pt(&pickle(&[&tensor(&longs, 0, &nan, &ones)]), &bytes), &["sizes is a float"]);
    refused(pt(&pickle(&[&tensor(&longs, 0, b"]", &ones)]), &bytes), &["sizes is a list"]);
    refused(pt(&pickle(&[&tensor(b"N", 0, &ones, &ones)]), &bytes), &["None for a storage"]);
    refused(pt(&pickle(&[b"ctorch._utils\n_rebuild_tensor_v2\n)R"]), &bytes), &["made of 0 parts"]);
    let conjugated = [b"ctorch._utils\n_rebuild_tensor_v2\n(", &longs[..], &int(0), &ones, &ones, b"\x89N}tR"].concat();
    refused(pt(&pickle(&[&conjugated]), &bytes), &["metadata"]);
    for (kind, elements, said) in [
        ("LongStorage", 4, "24 bytes, expected 4 elements of 8 bytes"),
        ("LongStorage", 2, "24 bytes"),
        ("IntStorage", 3, "expected 3 elements of 4 bytes"),
        ("LongStorage", -3, "no negative number"),
        ("DoubleStorage", i64::MAX, "24 bytes"),
    ] {
        refused(pt(&pickle(&[&storage(kind, elements)]), &bytes), &[said]);
    }
    let other_key =
        [b"(", &text("storage")[..], b"ctorch\nLongStorage\n", &text("../1"), &text("cpu"), &int(3), b"tQ"].concat();
    refused(pt(&pickle(&[&other_key]), &bytes), &["data/../1"]);
    refused(pt(&pickle(&[b"K\x01Q"]), &bytes), &["persistent id"]);
    let module =
        [b"(", &text("module")[..], b"ctorch\nLongStorage\n", &text("0"), &text("cpu"), &int(3), b"tQ"].concat();
    refused(pt(&pickle(&[&module]), &bytes), &["of another kind"]);
}

#[test]
fn cycles_and_depth_cost_nothing() {
    // A list that holds itself.
    let file = open(pt(&pickle(&[b"]q\x00h\x00a"]), &[])).unwrap();
    let root = file.document().root();
    assert_eq!(file.document().items(root).unwrap(), [root]);
    // Lists in lists: as deep as the stack, then no deeper; dropped without recursion.
    let deep = |depth: usize| open(pt(&pickle(&[&b"]".repeat(depth), &b"a".repeat(depth - 1)]), &[]));
    assert!(deep(8_000).is_ok());
    assert!(deep(20_000).unwrap_err().contains("more than the 1048576 bytes"));
    refused(pt(&pickle(&[&b"N".repeat(20_000)]), &[]), &["values deep"]);
    // Deeper still, from the inside out.
    let tuples = pickle(&[b")", &b"\x85".repeat(8_000)]);
    assert!(open(pt(&tuples, &[])).is_ok());
    refused(pt(&pickle(&[&b"(".repeat(20_000)]), &[]), &["marks deep"]);
}

#[test]
fn bombs_are_not_unpacked() {
    // Each list holds the one before ten times: 10^30 values if anybody expanded them, thirty lists here.
    let mut laughs = b"]q\x00".to_vec();
    for level in 1..30u8 {
        laughs.extend([b"]q", &[level][..], b"(", &[b'h', level - 1].repeat(10), b"e"].concat());
    }
    let all = [b"(", &laughs[..], b"t"].concat();
    assert!(open(pt(&pickle(&[&all]), &[])).is_ok());
    // Many empty lists: a byte each in the file, far more in memory.
    let lists = [b"(", &b"]".repeat(1000)[..], b"t"].concat();
    let many = pickle(&[&lists.repeat(20)]);
    refused(pt(&many, &[]), &["more than the 1048576 bytes"]);
    refused(pt(&pickle(&[b"N", &int(0), b"r\xff\xff\xff\x7f"]), &[]), &["the number 2147483647", "next number"]);
    refused(pt(&pickle(&[b"h\x05"]), &[]), &["asked for its number 5"]);
}

#[test]
fn numbers_and_texts_are_as_long_as_they_are() {
    refused(pt(&pickle(&[&[0x8a, 255], &[1; 255]]), &[]), &["255 bytes long", "at most 8 bytes"]);
    refused(pt(&pickle(&[b"\x8b\xff\xff\xff\x7f"]), &[]), &["LONG4"]);
    refused(pt(&pickle(&[b"X\xff\xff\xff\xff", b"short"]), &[]), &["expected 4294967295"]);
    refused(pt(&pickle(&[b"\x8c\xffshort"]), &[]), &["expected 255"]);
    refused(pt(&[], &[]), &["the pickle ends after 0 bytes"]);
    refused(pt(&[0x80, 2, b'N'], &[]), &["the pickle ends"]);
    refused(pt(&[0x80, 1, b'N', b'.'], &[]), &["protocol", "2 to 5"]);
    refused(pt(&[0x80, 6, b'N', b'.'], &[]), &["protocol", "2 to 5"]);
    refused(pt(&pickle(&[b"NN"]), &[]), &["one value in all"]);
    refused(pt(&pickle(&[b"N("]), &[]), &["stack", "empty"]);
    for opcodes in [
        &b"a"[..],
        b"]a",
        b"e",
        b"](a",
        b"s",
        b"}Ns",
        b"}(Nu",
        b"t",
        b"R",
        b"Q",
        b"q\x00",
        b"N(\x85",
        b"Na",
        b"]NNs",
        b"NNNs",
    ] {
        let message = open(pt(&pickle(&[opcodes]), &[])).expect_err("refused");
        assert!(message.starts_with("the pickle's "), "{opcodes:?}: {message}");
    }
}

proptest! {
    #[test]
    fn integers_are_two_s_complement(number: i64, extra in 0usize..3) {
        let mut bytes = number.to_le_bytes().to_vec();
        while bytes.len() > 1 && bytes[bytes.len() - 1] == if bytes[bytes.len() - 2] >= 0x80 { 0xff } else { 0 } {
            bytes.pop();
        }
        bytes.resize((bytes.len() + extra).min(8), if number < 0 { 0xff } else { 0 });
        let whole = pickle(&[&[0x8a, bytes.len() as u8], &bytes]);
        let document = read_pickle(whole, 0, &|_| None).unwrap();
        prop_assert_eq!(document.root(), Value::Int(number));
    }

    #[test]
    fn any_opcodes_end(opcodes in prop::collection::vec(prop::sample::select(READ.to_vec()), 0..400), at in any::<prop::sample::Index>(), byte: u8) {
        let mut bytes = pickle(&[&opcodes]);
        let at = at.index(bytes.len());
        bytes[at] = byte;
        let _ = read_pickle(bytes, 0, &|_| Some(8));
    }
}
