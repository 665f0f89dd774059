//! The values of a pickle: small, with handles into one arena for what has parts.
//!
//! A list that contains itself is a handle like any other, so neither reading nor dropping a value recurses.

use super::PickleError;
use super::array::{Element, Strided};
use super::call::Global;

/// Documents of small files may take this much all the same.
const FLOOR_BYTES: u64 = 1 << 20;
/// A vector that grows by doubling holds up to twice its elements, and while it moves the old ones too.
const GROWTH: u64 = 3;

/// A value; handles are of the document that it came from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// `None`.
    None,
    /// `True` or `False`.
    Bool(bool),
    /// An integer that fits.
    Int(i64),
    /// A float.
    Float(f64),
    /// A text: see [`Document::text`].
    Text(Text),
    /// A tuple: see [`Document::items`].
    Tuple(u32),
    /// A list: see [`Document::items`].
    List(u32),
    /// A dict or an `OrderedDict`: see [`Document::get`].
    Dict(u32),
    /// A tensor: see [`Document::tensor`].
    Tensor(u32),
    /// A storage, not yet part of a tensor.
    Storage(u32),
    /// A name that may be called.
    Global(Global),
}

/// A part of the pickle's bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Text {
    from: u32,
    length: u32,
}

/// Bytes of a tensor beside the pickle.
#[derive(Clone, Copy, Debug)]
pub struct Storage {
    /// Its name in the archive.
    pub(super) key: Text,
    /// Its element type.
    pub element: Element,
    /// How many elements.
    pub elements: u64,
}

/// A tensor: a storage, and how its elements are laid out in it.
#[derive(Clone, Debug)]
pub struct TensorRef {
    /// Where its elements are.
    pub storage: Storage,
    /// Which they are.
    pub(super) strided: Strided,
}

impl TensorRef {
    /// Its shape.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        &self.strided.shape
    }
}

/// All values of a pickle.
#[derive(Debug)]
pub struct Document {
    pickle: Vec<u8>,
    /// Of lists and tuples.
    sequences: Vec<Vec<Value>>,
    dicts: Vec<Vec<(Value, Value)>>,
    tensors: Vec<TensorRef>,
    storages: Vec<Storage>,
    root: Value,
    spent: u64,
    limit: u64,
}

impl Document {
    /// An empty one over a pickle's bytes, of a file of `file_bytes` bytes.
    pub(super) fn new(pickle: Vec<u8>, file_bytes: u64) -> Self {
        let limit = file_bytes.max(FLOOR_BYTES);
        let (sequences, dicts, tensors, storages) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self { pickle, sequences, dicts, tensors, storages, root: Value::None, spent: 0, limit }
    }

    /// The value that the pickle is.
    #[must_use]
    pub fn root(&self) -> Value {
        self.root
    }

    /// The bytes of a text; they need not be UTF-8.
    #[must_use]
    pub fn text(&self, text: Text) -> &[u8] {
        &self.pickle[text.from as usize..][..text.length as usize]
    }

    /// Parts of a list or a tuple; `None` of other values.
    #[must_use]
    pub fn items(&self, value: Value) -> Option<&[Value]> {
        match value {
            Value::List(at) | Value::Tuple(at) => Some(&self.sequences[at as usize]),
            _ => None,
        }
    }

    /// A dict's value under a text; the last of equals, as in Python. `None` also of other values.
    #[must_use]
    pub fn get(&self, dict: Value, key: &str) -> Option<Value> {
        let Value::Dict(at) = dict else { return None };
        let is_key = |item: &&(Value, Value)| matches!(item.0, Value::Text(text) if self.text(text) == key.as_bytes());
        self.dicts[at as usize].iter().rev().find(is_key).map(|item| item.1)
    }

    /// Tensors among the values; `None` of other values.
    #[must_use]
    pub fn tensor(&self, value: Value) -> Option<&TensorRef> {
        match value {
            Value::Tensor(at) => Some(&self.tensors[at as usize]),
            _ => None,
        }
    }

    /// All tensors, also those that nothing refers to.
    #[must_use]
    pub fn tensors(&self) -> &[TensorRef] {
        &self.tensors
    }

    /// In a few words, for messages.
    #[must_use]
    pub fn kind(value: Value) -> &'static str {
        match value {
            Value::None => "None",
            Value::Bool(_) => "a bool",
            Value::Int(_) => "an integer",
            Value::Float(_) => "a float",
            Value::Text(_) => "a text",
            Value::Tuple(_) => "a tuple",
            Value::List(_) => "a list",
            Value::Dict(_) => "a dict",
            Value::Tensor(_) => "a tensor",
            Value::Storage(_) => "a storage",
            Value::Global(_) => "a name",
        }
    }

    pub(super) fn pickle(&self) -> &[u8] {
        &self.pickle
    }

    pub(super) fn set_root(&mut self, root: Value) {
        self.root = root;
    }

    /// A part of the pickle as a text; the machine has checked that it is there.
    pub(super) fn text_at(from: usize, length: usize) -> Value {
        Value::Text(Text { from: from as u32, length: length as u32 })
    }

    pub(super) fn add_sequence(&mut self, items: &[Value]) -> Result<u32, PickleError> {
        self.spend::<Vec<Value>>(1)?;
        self.spend::<Value>(items.len())?;
        self.sequences.push(items.to_vec());
        Ok((self.sequences.len() - 1) as u32)
    }

    pub(super) fn add_dict(&mut self) -> Result<Value, PickleError> {
        self.spend::<Vec<(Value, Value)>>(1)?;
        self.dicts.push(Vec::new());
        Ok(Value::Dict((self.dicts.len() - 1) as u32))
    }

    pub(super) fn add_storage(&mut self, storage: Storage) -> Result<Value, PickleError> {
        self.spend::<Storage>(1)?;
        self.storages.push(storage);
        Ok(Value::Storage((self.storages.len() - 1) as u32))
    }

    pub(super) fn add_tensor(&mut self, tensor: TensorRef) -> Result<Value, PickleError> {
        self.spend::<TensorRef>(1)?;
        self.spend::<u64>(2 * tensor.strided.shape.len())?;
        self.tensors.push(tensor);
        Ok(Value::Tensor((self.tensors.len() - 1) as u32))
    }

    pub(super) fn storage(&self, at: u32) -> Storage {
        self.storages[at as usize]
    }

    /// False when it is no list.
    pub(super) fn extend(&mut self, list: Value, items: &[Value]) -> Result<bool, PickleError> {
        let Value::List(at) = list else { return Ok(false) };
        self.spend::<Value>(items.len())?;
        self.sequences[at as usize].extend_from_slice(items);
        Ok(true)
    }

    /// False when it is no dict, or a value has no key.
    pub(super) fn set(&mut self, dict: Value, items: &[Value]) -> Result<bool, PickleError> {
        let Value::Dict(at) = dict else { return Ok(false) };
        let (pairs, []) = items.as_chunks::<2>() else { return Ok(false) };
        self.spend::<(Value, Value)>(pairs.len())?;
        self.dicts[at as usize].extend(pairs.iter().map(|[key, value]| (*key, *value)));
        Ok(true)
    }

    /// Counts memory before it is taken.
    pub(super) fn spend<T>(&mut self, count: usize) -> Result<(), PickleError> {
        self.spent = self.spent.saturating_add((size_of::<T>() as u64 * GROWTH).saturating_mul(count as u64));
        if self.spent > self.limit {
            return Err(PickleError::Memory { limit: self.limit });
        }
        Ok(())
    }
}
