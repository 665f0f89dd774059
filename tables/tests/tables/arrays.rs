//! Integers read from safetensors files of other programs.

use proptest::prelude::*;
use safetensors::tensor::{Dtype, TensorView, serialize};
use semmoe_tables::Arrays;

fn file(dtype: Dtype, shape: &[usize], data: &[u8]) -> Arrays {
    let tensor = TensorView::new(dtype, shape.to_vec(), data).unwrap();
    Arrays::from_bytes(serialize([("records.0.ids", tensor)], None).unwrap()).unwrap()
}

#[test]
fn integers_of_any_width_are_read() {
    for (dtype, data, expected) in [
        (Dtype::BOOL, &[0, 1][..], [Some(0), Some(1)]),
        (Dtype::U8, &[0, 255], [Some(0), Some(255)]),
        (Dtype::I8, &[127, 255], [Some(127), Some(-1)]),
        (Dtype::U16, &[1, 0, 255, 255], [Some(1), Some(65_535)]),
        (Dtype::I16, &[1, 0, 254, 255], [Some(1), Some(-2)]),
        (Dtype::U32, &[1, 0, 0, 0, 255, 255, 255, 255], [Some(1), Some(u32::MAX.into())]),
        (Dtype::I32, &[1, 0, 0, 0, 0, 0, 0, 128], [Some(1), Some(i32::MIN.into())]),
        (Dtype::I64, &[[1u8, 0, 0, 0, 0, 0, 0, 0], [255; 8]].concat(), [Some(1), Some(-1)]),
        // Above i64::MAX.
        (Dtype::U64, &[[1u8, 0, 0, 0, 0, 0, 0, 0], [255; 8]].concat(), [Some(1), None]),
    ] {
        let file = file(dtype, &[2, 1], data);
        assert_eq!(file.names().collect::<Vec<_>>(), ["records.0.ids"]);
        let array = file.get("records.0.ids").unwrap();
        assert!(array.is_integer());
        assert_eq!((array.dtype(), array.shape()), (format!("{dtype:?}").as_str(), &[2, 1][..]));
        assert_eq!([array.int(&[0, 0]), array.int(&[1, 0])], expected, "{dtype:?}");
        assert_eq!(array.ints().collect::<Vec<_>>(), expected, "{dtype:?}");
    }
}

#[test]
fn other_numbers_are_no_integers() {
    for dtype in [Dtype::F32, Dtype::I32] {
        let file = file(dtype, &[2], &[0; 8]);
        let array = file.get("records.0.ids").unwrap();
        let integer = dtype == Dtype::I32;
        assert_eq!((array.is_integer(), array.int(&[1]).is_some()), (integer, integer));
        assert_eq!(array.ints().count(), if integer { 2 } else { 0 });
        assert!(file.get("records.0").is_none());
    }
    // An unknown type has an unknown size.
    let header = br#"{"x":{"dtype":"I4","shape":[1099511627776],"data_offsets":[0,1]}}"#;
    let file = Arrays::from_bytes([&(header.len() as u64).to_le_bytes()[..], header, &[7]].concat()).unwrap();
    let array = file.get("x").unwrap();
    assert_eq!((array.is_integer(), array.int(&[5]), array.ints().count()), (false, None, 0));
}

#[test]
#[should_panic(expected = "an index within the array")]
fn an_index_beyond_the_array_is_a_bug() {
    let _ = file(Dtype::U8, &[2, 1], &[0; 2]).get("records.0.ids").unwrap().int(&[0, 1]);
}

proptest! {
    #[test]
    fn any_bytes_are_an_error_and_no_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(Arrays::from_bytes(bytes).is_err());
    }

    #[test]
    fn places_are_the_last_index_fastest(shape in prop::collection::vec(1usize..5, 0..4), pick in any::<prop::sample::Index>()) {
        let elements: usize = shape.iter().product();
        let data: Vec<u8> = (0..elements as u16).flat_map(u16::to_le_bytes).collect();
        let file = file(Dtype::U16, &shape, &data);
        let flat = pick.index(elements);
        let index: Vec<usize> = (0..shape.len()).map(|at| flat / shape[at + 1..].iter().product::<usize>() % shape[at]).collect();
        prop_assert_eq!(file.get("records.0.ids").unwrap().int(&index), Some(flat as i64));
    }
}
