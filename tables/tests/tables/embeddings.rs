//! Input embeddings read from checkpoints of others.

use std::path::Path;

use half::{bf16, f16};
use proptest::prelude::*;
use safetensors::tensor::{Dtype, TensorView, serialize};
use semmoe_tables::{Embeddings, TokenId};

const NAME: &str = "model.embed_tokens.weight";

fn bytes(values: &[f32], dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::BF16 => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
        Dtype::F16 => values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect(),
        Dtype::F64 => values.iter().flat_map(|&value| f64::from(value).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|&value| value.to_le_bytes()).collect(),
    }
}

/// A checkpoint with one tensor, and a small one that shifts its alignment.
fn file(name: &str, shape: &[usize], values: &[f32], dtype: Dtype) -> Vec<u8> {
    let (data, other) = (bytes(values, dtype), [1u8; 3]);
    let tensor = TensorView::new(dtype, shape.to_vec(), &data).unwrap();
    let other = TensorView::new(Dtype::U8, vec![3], &other).unwrap();
    serialize([("a.bias", other), (name, tensor)], None).unwrap()
}

fn refused(bytes: Vec<u8>, name: Option<&str>) -> String {
    Embeddings::from_bytes(bytes, name).unwrap_err().to_string()
}

proptest! {
    #[test]
    fn rows_are_read_as_they_were_written(rows in 1usize..9, width in 1usize..7, seed in any::<u32>()) {
        let values: Vec<f32> = (0..rows * width).map(|at| ((seed as usize).wrapping_mul(31) + at * 7) as f32 % 64.0).collect();
        for dtype in [Dtype::BF16, Dtype::F16, Dtype::F32] {
            let found = Embeddings::from_bytes(file(NAME, &[rows, width], &values, dtype), None).unwrap();
            prop_assert_eq!((found.rows(), found.width()), (rows, width));
            let mut row = vec![0.0; width];
            for (token, expected) in values.chunks_exact(width).enumerate() {
                found.read(TokenId::new(token as u32), &mut row);
                prop_assert_eq!(&row[..], expected);
            }
        }
    }

    #[test]
    fn any_bytes_are_an_error_and_no_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(Embeddings::from_bytes(bytes, None).is_err());
    }
}

#[test]
fn what_is_no_matrix_of_finite_numbers_is_refused() {
    let said = refused(file(NAME, &[6], &[0.0; 6], Dtype::F32), None);
    assert!(said.contains("of shape [6], expected a matrix"), "{said}");
    let said = refused(file(NAME, &[0, 6], &[], Dtype::F32), None);
    assert!(said.contains("of shape [0, 6]"), "{said}");
    let said = refused(file(NAME, &[3, 2], &[0.0; 6], Dtype::F64), None);
    assert!(said.contains("is F64, expected BF16, F16 or F32"), "{said}");
    for dtype in [Dtype::BF16, Dtype::F16, Dtype::F32] {
        let said = refused(file(NAME, &[3, 2], &[0.0, 1.0, 2.0, 3.0, 4.0, f32::NAN], dtype), None);
        assert!(said.contains("not finite at row 2, column 1"), "{said}");
    }
}

#[test]
fn the_tensor_is_the_named_or_the_usual_one() {
    let other = || file("transformer.wte.weight", &[1, 2], &[1.0, 2.0], Dtype::F32);
    let said = refused(other(), None);
    assert!(said.contains("no such tensor") && said.contains("embed_tokens.weight"), "{said}");
    assert_eq!(Embeddings::from_bytes(other(), Some("transformer.wte.weight")).unwrap().rows(), 1);
    let said = refused(other(), Some("wte"));
    assert!(said.contains("expected the tensor `wte`"), "{said}");
    let data = bytes(&[1.0], Dtype::F32);
    let tensor = || TensorView::new(Dtype::F32, vec![1, 1], &data).unwrap();
    let two = serialize([(NAME, tensor()), ("draft.embed_tokens.weight", tensor())], None).unwrap();
    let said = refused(two.clone(), None);
    assert!(said.contains("found both `draft.embed_tokens.weight` and `model.embed_tokens.weight`"), "{said}");
    assert!(Embeddings::from_bytes(two, Some(NAME)).is_ok());
}

#[test]
fn an_index_says_which_file() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes).unwrap();
    let index =
        |file: &str| format!(r#"{{"metadata": {{}}, "weight_map": {{"lm_head.weight": "b", "{NAME}": "{file}"}}}}"#);
    write("model-2.safetensors", &file(NAME, &[2, 1], &[3.0, 4.0], Dtype::F16));
    write("model.safetensors.index.json", index("model-2.safetensors").as_bytes());
    for path in [folder.path(), &folder.path().join("model.safetensors.index.json")] {
        let found = Embeddings::open(path, None).unwrap();
        assert_eq!((found.rows(), found.path()), (2, &*folder.path().join("model-2.safetensors")));
    }
    let open = |path: &Path| Embeddings::open(path, None).unwrap_err().to_string();
    for (content, said) in [
        (index("../model-2.safetensors"), "expected a file in the same directory"),
        (index("none.safetensors"), "none.safetensors"),
        ("{}".to_owned(), "not a checkpoint index"),
        ("[".to_owned(), "not a checkpoint index"),
        (r#"{"weight_map": {}}"#.to_owned(), "no such tensor"),
    ] {
        write("model.safetensors.index.json", content.as_bytes());
        let found = open(folder.path());
        assert!(found.contains(said), "{found}");
    }
    assert!(open(&folder.path().join("none")).contains("none"));
}

#[test]
fn the_bundled_model() {
    let checkpoint = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/tiny-qwen3moe-15m");
    let found = Embeddings::open(&checkpoint, None).unwrap();
    assert_eq!((found.rows(), found.width()), (10_240, 256));
}
