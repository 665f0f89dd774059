//! The three things that a pickle may name and call: a dict, a storage, a tensor. They are built here, in Rust.

use super::PickleError;
use super::array::{Element, Strided};
use super::error::shown;
use super::value::{Document, Storage, TensorRef, Value};

/// A name that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Global {
    /// `collections.OrderedDict`.
    OrderedDict,
    /// `torch._utils._rebuild_tensor_v2`.
    Tensor,
    /// `torch.FloatStorage` and its like.
    Storage(Element),
}

/// `torch`'s storages.
const STORAGES: [(&[u8], Element); 10] = [
    (b"DoubleStorage", Element::F64),
    (b"FloatStorage", Element::F32),
    (b"HalfStorage", Element::F16),
    (b"BFloat16Storage", Element::BF16),
    (b"LongStorage", Element::I64),
    (b"IntStorage", Element::I32),
    (b"ShortStorage", Element::I16),
    (b"CharStorage", Element::I8),
    (b"ByteStorage", Element::U8),
    (b"BoolStorage", Element::Bool),
];

/// The class that a name stands for.
pub(super) fn global(module: &[u8], name: &[u8], at: usize) -> Result<Value, PickleError> {
    let known = match (module, name) {
        (b"collections", b"OrderedDict") => Some(Global::OrderedDict),
        (b"torch._utils", b"_rebuild_tensor_v2") => Some(Global::Tensor),
        (b"torch", name) => {
            STORAGES.iter().find(|(known, _)| *known == name).map(|(_, element)| Global::Storage(*element))
        }
        _ => None,
    };
    let unknown = || PickleError::Global { name: format!("{}.{}", shown(module), shown(name)), at };
    known.map(Value::Global).ok_or_else(unknown)
}

/// The result of a call.
pub(super) fn reduce(
    document: &mut Document,
    function: Value,
    arguments: Value,
    at: usize,
) -> Result<Value, PickleError> {
    let wrong = |found: Value, expected| {
        let found = Document::kind(found).to_owned();
        Err(PickleError::Pickle { what: "call", at, found, expected })
    };
    let Value::Global(function) = function else { return wrong(function, "a name to call") };
    let Value::Tuple(_) = arguments else { return wrong(arguments, "a tuple of arguments") };
    let given: Vec<Value> =
        document.items(arguments).map(|items| items.iter().take(8).copied().collect()).unwrap_or_default();
    match function {
        Global::OrderedDict if given.is_empty() => document.add_dict(),
        Global::OrderedDict => wrong(given[0], "an OrderedDict without arguments"),
        Global::Storage(_) => wrong(arguments, "a storage that is only named"),
        Global::Tensor => {
            let tensor = tensor(document, &given, at)?;
            document.add_tensor(tensor)
        }
    }
}

/// A tensor from `(storage, offset, sizes, strides, requires_grad, hooks)`, and perhaps metadata that says nothing.
fn tensor(document: &Document, given: &[Value], at: usize) -> Result<TensorRef, PickleError> {
    let wrong =
        |found: String| PickleError::Pickle { what: "tensor", at, found, expected: "storage, offset, sizes, strides" };
    let (&[storage, offset, sizes, strides, _, _], more) =
        given.split_first_chunk::<6>().ok_or_else(|| wrong(format!("made of {} parts", given.len())))?;
    // Metadata can say that the values are to be conjugated or negated.
    if !matches!(more, [] | [Value::None]) {
        return Err(wrong("one with metadata".into()));
    }
    let Value::Storage(storage) = storage else {
        return Err(wrong(format!("{} for a storage", Document::kind(storage))));
    };
    let numbers = |what: &'static str, value: Value| -> Result<Vec<u64>, PickleError> {
        let Value::Tuple(_) = value else { return Err(PickleError::array(what, Document::kind(value), "a tuple")) };
        let items = document.items(value).unwrap_or_default();
        if items.len() > Strided::MAX_DIMENSIONS {
            return Err(PickleError::array(
                what,
                format!("{} long", items.len()),
                format!("at most {}", Strided::MAX_DIMENSIONS),
            ));
        }
        items.iter().map(|item| number(what, *item)).collect()
    };
    let storage = document.storage(storage);
    let strided = Strided {
        offset: number("offset", offset)?,
        shape: numbers("sizes", sizes)?,
        strides: numbers("strides", strides)?,
    };
    strided.check(storage.elements)?;
    Ok(TensorRef { storage, strided })
}

fn number(what: &'static str, value: Value) -> Result<u64, PickleError> {
    match value {
        Value::Int(number) => u64::try_from(number).map_err(|_| PickleError::array(what, number, "no negative number")),
        other => Err(PickleError::array(what, Document::kind(other), "an integer")),
    }
}

/// The storage that a persistent id names: `("storage", type, key, location, elements)`. `bytes_of` returns its bytes
/// in the archive.
pub(super) fn persistent(
    document: &mut Document,
    id: Value,
    at: usize,
    bytes_of: &dyn Fn(&[u8]) -> Option<u64>,
) -> Result<Value, PickleError> {
    let wrong = |found: &str| {
        let expected = "(\"storage\", type, key, location, elements)";
        PickleError::Pickle { what: "persistent id", at, found: found.to_owned(), expected }
    };
    let parts = match id {
        Value::Tuple(_) => document.items(id).unwrap_or_default(),
        other => return Err(wrong(Document::kind(other))),
    };
    let &[
        Value::Text(tag),
        Value::Global(Global::Storage(element)),
        Value::Text(key),
        Value::Text(_),
        Value::Int(elements),
    ] = parts
    else {
        return Err(wrong("made of other parts"));
    };
    if document.text(tag) != b"storage" {
        return Err(wrong("of another kind"));
    }
    let elements =
        u64::try_from(elements).map_err(|_| PickleError::array("storage", elements, "no negative number"))?;
    let name = document.text(key);
    let found = bytes_of(name).ok_or_else(|| PickleError::NoEntry { name: format!("data/{}", shown(name)) })?;
    if elements.checked_mul(element.bytes()) != Some(found) {
        let expected = format!("{elements} elements of {} bytes", element.bytes());
        return Err(PickleError::array("storage", format!("{found} bytes"), expected));
    }
    document.add_storage(Storage { key, element, elements })
}
