//! Files of real torch and NumPy.

use semmoe_profiler::pickle::{Array, Document, Element, NpzFile, PickleError, Source, TorchFile, Value, read_npy};

use super::{data, key};

fn all(array: &Array) -> Vec<i64> {
    let shape: Vec<usize> = array.shape().iter().map(|size| *size as usize).collect();
    let count: usize = shape.iter().product();
    let index = |mut flat: usize| -> Vec<usize> {
        let mut index: Vec<usize> = shape
            .iter()
            .rev()
            .map(|size| {
                let at = flat % size;
                flat /= size;
                at
            })
            .collect();
        index.reverse();
        index
    };
    (0..count).map(|flat| array.int(&index(flat)).unwrap()).collect()
}

#[test]
fn views_kinds_and_plain_values() {
    for name in ["views.pt", "views_protocol_4.pt"] {
        let file = TorchFile::open(&data(name)).unwrap();
        let document = file.document();
        let array = |value: Value| file.array(value).unwrap().unwrap();
        let named = |name: &str| array(key(document, name));
        let part = named("part");
        assert_eq!((part.shape(), all(&part)), (&[3, 2][..], vec![8, 9, 14, 15, 20, 21]));
        let turned = named("turned");
        assert_eq!((turned.shape(), &all(&turned)[..6]), (&[6, 4][..], &[0, 6, 12, 18, 1, 7][..]));
        assert_eq!((named("scalar").shape(), all(&named("scalar"))), (&[][..], vec![7]));
        assert_eq!(named("empty").shape(), [0, 3]);
        let [first, second] = document.items(key(document, "shared")).unwrap() else { panic!("two") };
        assert_eq!(first, second, "one tensor, twice");
        check_kinds(document, &array);
        check_others(document);
    }
}

fn check_kinds(document: &Document, array: &dyn Fn(Value) -> Array) {
    let kinds = key(document, "kinds");
    for (name, element) in [
        ("float64", Element::F64),
        ("float32", Element::F32),
        ("float16", Element::F16),
        ("bfloat16", Element::BF16),
        ("int64", Element::I64),
        ("int32", Element::I32),
        ("int16", Element::I16),
        ("int8", Element::I8),
        ("uint8", Element::U8),
    ] {
        let found = array(document.get(kinds, &format!("torch.{name}")).unwrap());
        assert_eq!((found.element(), found.shape()), (element, &[3][..]));
        if element.is_integer() {
            assert_eq!(all(&found), [0, 1, 2]);
        } else {
            assert_eq!(found.int(&[1]), None);
        }
    }
}

fn check_others(document: &Document) {
    let others = document.items(key(document, "others")).unwrap();
    let plain = [
        Value::Bool(true),
        Value::Bool(false),
        Value::None,
        Value::Int(-5),
        Value::Int(1 << 40),
        Value::Int(-(1 << 40)),
        Value::Float(1.5),
    ];
    assert_eq!(&others[..7], plain);
    let Value::Text(text) = others[7] else { panic!("a text") };
    assert_eq!(document.text(text), "text \u{20ac}".as_bytes());
    assert_eq!(&others[8..10], [Value::Int(70_000), Value::Int(300)]);
    let kinds: Vec<&str> = others[10..].iter().map(|value| Document::kind(*value)).collect();
    assert_eq!(kinds, ["a tuple", "a list", "a dict"]);
}

#[test]
fn the_same_counts_in_every_form() {
    let torch = |name: &str| {
        let file = TorchFile::open(&data(name)).unwrap();
        all(&file.array(file.document().root()).unwrap().unwrap())
    };
    let npy = |name: &str| all(&read_npy(&Source::open(&data(name)).unwrap()).unwrap());
    let expected = torch("logcnt.pt");
    assert_eq!((expected.len(), expected[7], expected[8], expected[31]), (32, 0, 3 * 8 + 3 * 32, 3 * 31 + 3 * 32));
    assert_eq!(torch("logcnt_strided.pt"), expected);
    assert_eq!(npy("logcnt.npy"), expected);
    assert_eq!(npy("fortran.npy"), expected);
    let npz = NpzFile::open(&data("logcnt.npz")).unwrap();
    assert_eq!(all(&npz.array("logical_count").unwrap().unwrap()), expected);
    assert_eq!(npz.names().collect::<Vec<_>>(), [b"logical_count.npy"]);
    assert!(npz.array("other").unwrap().is_none());
}

#[test]
fn what_is_not_read_says_why() {
    let torch = |name: &str| TorchFile::open(&data(name)).unwrap_err().to_string();
    assert!(torch("legacy.pt").contains("before 1.6"), "{}", torch("legacy.pt"));
    assert!(torch("logcnt.npy").starts_with("not an archive"), "{}", torch("logcnt.npy"));
    assert!(torch("logcnt.npz").contains("data.pkl"), "{}", torch("logcnt.npz"));
    assert!(TorchFile::open(&data("")).unwrap_err().to_string().contains("not a regular file"));
    assert!(matches!(TorchFile::open(&data("absent")), Err(PickleError::Io(_))));
    let npy = |name: &str| read_npy(&Source::open(&data(name)).unwrap()).unwrap_err().to_string();
    assert!(npy("objects.npy").contains("`|O`"), "{}", npy("objects.npy"));
    assert!(npy("big.npy").contains("`>i4`"), "{}", npy("big.npy"));
    assert!(npy("logcnt.pt").starts_with("not a NumPy array"));
    let compressed = NpzFile::open(&data("compressed.npz")).unwrap_err().to_string();
    assert!(compressed.contains("compressed") && compressed.contains("numpy.savez"), "{compressed}");
}
