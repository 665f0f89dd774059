//! Archives and pickles written by hand, also such as no program writes.

/// One entry of an archive.
pub(crate) struct Entry<'a> {
    pub(crate) name: &'a str,
    pub(crate) bytes: &'a [u8],
    pub(crate) method: u16,
    /// A wrong entry in the directory.
    pub(crate) lies: Lies,
}

#[derive(Default)]
pub(crate) struct Lies {
    pub(crate) length: Option<u32>,
    pub(crate) header: Option<u32>,
}

pub(crate) fn stored<'a>(name: &'a str, bytes: &'a [u8]) -> Entry<'a> {
    Entry { name, bytes, method: 0, lies: Lies::default() }
}

pub(crate) fn zip(entries: &[Entry<'_>]) -> Vec<u8> {
    let (mut file, mut directory) = (Vec::new(), Vec::new());
    for entry in entries {
        let length = entry.lies.length.unwrap_or(entry.bytes.len() as u32).to_le_bytes();
        let header = entry.lies.header.unwrap_or(file.len() as u32);
        let name = (entry.name.len() as u16).to_le_bytes();
        let method = entry.method.to_le_bytes();
        let shared = [&[0, 0], &method[..], &[0; 4], &[0; 4], &length, &length, &name, &[0, 0]].concat();
        file.extend([b"PK\x03\x04\x14\0", &shared[..], entry.name.as_bytes(), entry.bytes].concat());
        let rest = [&[0; 2][..], &[0; 2], &[0; 2], &[0; 4], &header.to_le_bytes(), entry.name.as_bytes()].concat();
        directory.extend([b"PK\x01\x02\x14\0\x14\0", &shared[..], &rest].concat());
    }
    let count = (entries.len() as u16).to_le_bytes();
    let (size, from) = ((directory.len() as u32).to_le_bytes(), (file.len() as u32).to_le_bytes());
    [&file[..], &directory, b"PK\x05\x06\0\0\0\0", &count, &count, &size, &from, &[0, 0]].concat()
}

/// A `.pt` file of a pickle and one storage "0".
pub(crate) fn pt(pickle: &[u8], storage: &[u8]) -> Vec<u8> {
    zip(&[stored("a/data.pkl", pickle), stored("a/data/0", storage)])
}

/// A protocol 2 pickle of these opcodes.
pub(crate) fn pickle(opcodes: &[&[u8]]) -> Vec<u8> {
    [&[0x80, 2], &opcodes.concat()[..], b"."].concat()
}

pub(crate) fn text(text: &str) -> Vec<u8> {
    [b"X", &(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat()
}

pub(crate) fn int(number: i64) -> Vec<u8> {
    [&[0x8a, 8][..], &number.to_le_bytes()].concat()
}

/// A storage of `elements` of the archive's entry "0".
pub(crate) fn storage(kind: &str, elements: i64) -> Vec<u8> {
    let global = format!("ctorch\n{kind}\n");
    [b"(", &text("storage")[..], global.as_bytes(), &text("0"), &text("cpu"), &int(elements), b"tQ"].concat()
}

/// A tensor of a storage, with sizes and strides as opcodes.
pub(crate) fn tensor(storage: &[u8], offset: i64, sizes: &[u8], strides: &[u8]) -> Vec<u8> {
    let rebuild = b"ctorch._utils\n_rebuild_tensor_v2\n";
    let hooks = b"\x89ccollections\nOrderedDict\n)R";
    [&rebuild[..], b"(", storage, &int(offset), sizes, strides, hooks, b"tR"].concat()
}

/// A tuple of integers.
pub(crate) fn tuple(numbers: &[i64]) -> Vec<u8> {
    let items: Vec<u8> = numbers.iter().flat_map(|number| int(*number)).collect();
    [b"(", &items[..], b"t"].concat()
}
