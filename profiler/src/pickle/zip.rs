//! The directory of a zip archive whose entries are stored, as torch and NumPy write them.
//!
//! Compressed entries are refused, and so are entries that share bytes: so no archive is more than its own size.

use super::PickleError;
use super::error::shown;
use super::source::Source;

/// Signature and fixed part of the record at the end.
const END: ([u8; 4], u64) = (*b"PK\x05\x06", 22);
/// The one before it in archives beyond 4 GiB, which says where the 64-bit record is.
const LOCATOR: ([u8; 4], u64) = (*b"PK\x06\x07", 20);
const END_64: ([u8; 4], u64) = (*b"PK\x06\x06", 56);
/// Of each entry in the directory, and in front of its bytes.
const ENTRY: ([u8; 4], usize) = (*b"PK\x01\x02", 46);
const LOCAL: ([u8; 4], u64) = (*b"PK\x03\x04", 30);
/// The longest comment at the end.
const MAX_COMMENT: u64 = 65_535;
/// The extra field with 64-bit sizes.
const EXTRA_64: u16 = 1;

/// An archive.
#[derive(Debug)]
pub(super) struct Zip {
    /// The directory's bytes; names are parts of it.
    directory: Vec<u8>,
    /// Sorted by name.
    entries: Vec<Entry>,
}

/// One entry.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    /// Its name, as a part of the directory.
    name: (u32, u16),
    /// Where its header is.
    header: u64,
    /// Where its bytes are.
    pub(super) from: u64,
    /// How many they are.
    pub(super) length: u64,
}

impl Zip {
    /// Whether the bytes begin as an archive does.
    pub(super) fn is_one(source: &Source) -> bool {
        source.read("signature", 0, 4).is_ok_and(|start| start == LOCAL.0)
    }

    /// Reads and checks the directory.
    pub(super) fn open(source: &Source) -> Result<Self, PickleError> {
        let (from, length, count) = directory_of(source)?;
        let directory = source.read("the archive's directory", from, length)?;
        // Offsets of names are kept in 32 bits.
        if u32::try_from(length).is_err() || count > length / ENTRY.1 as u64 {
            return Err(PickleError::archive(
                "directory",
                format!("{length} bytes for {count} entries"),
                "one that fits",
            ));
        }
        let mut entries = Vec::with_capacity(count as usize);
        let mut at = 0;
        for _ in 0..count {
            let (entry, next) = entry(source, &directory, at)?;
            entries.push(entry);
            at = next;
        }
        if at != directory.len() {
            return Err(PickleError::archive(
                "directory",
                format!("{} bytes longer", directory.len() - at),
                "its entries alone",
            ));
        }
        check_apart(&mut entries, from)?;
        let mut zip = Self { directory, entries };
        let Self { directory, entries } = &mut zip;
        entries.sort_by(|a, b| name_in(directory, a).cmp(name_in(directory, b)));
        if let Some(pair) = zip.entries.windows(2).find(|pair| zip.name(&pair[0]) == zip.name(&pair[1])) {
            return Err(PickleError::archive(
                "entry",
                format!("`{}` twice", shown(zip.name(&pair[0]))),
                "each name once",
            ));
        }
        Ok(zip)
    }

    /// All entries by name.
    pub(super) fn names(&self) -> impl Iterator<Item = &[u8]> {
        self.entries.iter().map(|entry| self.name(entry))
    }

    /// An entry.
    pub(super) fn find(&self, name: &[u8]) -> Option<Entry> {
        let at = self.entries.binary_search_by(|entry| self.name(entry).cmp(name)).ok()?;
        Some(self.entries[at])
    }

    fn name(&self, entry: &Entry) -> &[u8] {
        name_in(&self.directory, entry)
    }
}

fn name_in<'a>(directory: &'a [u8], entry: &Entry) -> &'a [u8] {
    let from = entry.name.0 as usize;
    &directory[from..from + usize::from(entry.name.1)]
}

/// Offset and length of the directory, and its number of entries.
fn directory_of(source: &Source) -> Result<(u64, u64, u64), PickleError> {
    let length = source.length();
    let tail = length.min(END.1 + MAX_COMMENT);
    let bytes = source.read("the archive", length - tail, tail)?;
    // The comment after it must reach to the end of the file, so that its bytes cannot be taken for the record.
    let is_end = |at: &usize| {
        bytes[*at..].starts_with(&END.0) && le16(&bytes, at + 20) as usize == bytes.len() - at - END.1 as usize
    };
    let last = (bytes.len() + 1).saturating_sub(END.1 as usize);
    let at = (0..last).rev().find(is_end);
    let at = at.ok_or_else(|| PickleError::archive("end", "missing", "a whole file: it may have been cut"))?;
    if le16(&bytes, at + 4) != 0 || le16(&bytes, at + 6) != 0 {
        return Err(PickleError::archive("part", "one of several", "all in one file"));
    }
    let (count, size, from) =
        (le16(&bytes, at + 10).into(), le32(&bytes, at + 12).into(), le32(&bytes, at + 16).into());
    let end = length - tail + at as u64;
    let (from, size, count) = match (count, size, from) {
        (0xffff, _, _) | (_, 0xffff_ffff, _) | (_, _, 0xffff_ffff) => directory_64(source, end)?,
        _ => (from, size, count),
    };
    if from.checked_add(size).is_none_or(|after| after > end) {
        return Err(PickleError::archive("directory", format!("{size} bytes at {from}"), "one before the end"));
    }
    Ok((from, size, count))
}

fn directory_64(source: &Source, end: u64) -> Result<(u64, u64, u64), PickleError> {
    let missing = || PickleError::archive("64-bit end", "missing", "one, as sizes are left to it");
    let locator = end.checked_sub(LOCATOR.1).ok_or_else(missing)?;
    let bytes = source.read("the archive's locator", locator, LOCATOR.1)?;
    let at = le64(&bytes, 8);
    if !bytes.starts_with(&LOCATOR.0) || at.checked_add(END_64.1).is_none_or(|after| after > locator) {
        return Err(missing());
    }
    let bytes = source.read("the archive's 64-bit end", at, END_64.1)?;
    if !bytes.starts_with(&END_64.0) {
        return Err(missing());
    }
    Ok((le64(&bytes, 48), le64(&bytes, 40), le64(&bytes, 32)))
}

/// The entry at `at` of the directory, and where the next begins.
fn entry(source: &Source, directory: &[u8], at: usize) -> Result<(Entry, usize), PickleError> {
    let short = || PickleError::archive("directory", format!("over after {} bytes", directory.len()), "whole entries");
    let fixed = directory.get(at..at + ENTRY.1).filter(|fixed| fixed.starts_with(&ENTRY.0)).ok_or_else(short)?;
    let (flags, method) = (le16(fixed, 8), le16(fixed, 10));
    let (name, extra, comment) = (le16(fixed, 28), le16(fixed, 30), le16(fixed, 32));
    let after_name = at + ENTRY.1 + usize::from(name);
    let next = after_name + usize::from(extra) + usize::from(comment);
    let bytes = directory.get(at + ENTRY.1..next).ok_or_else(short)?;
    let shown_name = || shown(&bytes[..usize::from(name)]);
    if flags & 1 != 0 || method != 0 {
        let found = format!("`{}` compressed or encrypted", shown_name());
        return Err(PickleError::archive("entry", found, "stored bytes, as torch.save and numpy.savez write them"));
    }
    let [packed, length, header] = sizes(fixed, &bytes[usize::from(name)..][..usize::from(extra)]);
    if packed != length {
        let found = format!("`{}` of {packed} and {length} bytes", shown_name());
        return Err(PickleError::archive("entry", found, "one length, as it is stored"));
    }
    let local = source.read("an entry's header", header, LOCAL.1)?;
    if !local.starts_with(&LOCAL.0) || le16(&local, 26) != name {
        return Err(PickleError::archive("entry", format!("`{}` without a header", shown_name()), "a header"));
    }
    let from = header + LOCAL.1 + u64::from(name) + u64::from(le16(&local, 28));
    let entry = Entry { name: ((at + ENTRY.1) as u32, name), header, from, length };
    Ok((entry, next))
}

/// Stored length, real length and place of the header; the extra field has those that do not fit into 32 bits.
fn sizes(fixed: &[u8], mut extra: &[u8]) -> [u64; 3] {
    let mut sizes = [le32(fixed, 20), le32(fixed, 24), le32(fixed, 42)].map(u64::from);
    while extra.len() >= 4 {
        let (tag, length) = (le16(extra, 0), usize::from(le16(extra, 2)));
        let Some(field) = extra.get(4..4 + length) else { break };
        if tag == EXTRA_64 {
            let mut values = field.chunks_exact(8);
            // Real length, stored length, place: each only if its 32 bits are full.
            for which in [1, 0, 2] {
                if sizes[which] == 0xffff_ffff
                    && let Some(value) = values.next()
                {
                    sizes[which] = le64(value, 0);
                }
            }
        }
        extra = &extra[4 + length..];
    }
    sizes
}

/// Refuses entries that overlap each other or the directory.
fn check_apart(entries: &mut [Entry], directory: u64) -> Result<(), PickleError> {
    entries.sort_by_key(|entry| entry.header);
    let ends = entries.iter().skip(1).map(|entry| entry.header).chain([directory]);
    for (entry, limit) in entries.iter().zip(ends) {
        if entry.from.checked_add(entry.length).is_none_or(|end| end > limit) {
            let found = format!("{} bytes at {}", entry.length, entry.from);
            return Err(PickleError::archive("entry", found, "one that ends before the next begins"));
        }
    }
    Ok(())
}

/// Little-endian numbers at a place that the caller has made sure of.
fn le16(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn le32(bytes: &[u8], at: usize) -> u32 {
    u32::from(le16(bytes, at)) | u32::from(le16(bytes, at + 2)) << 16
}

fn le64(bytes: &[u8], at: usize) -> u64 {
    u64::from(le32(bytes, at)) | u64::from(le32(bytes, at + 4)) << 32
}
