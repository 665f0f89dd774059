//! The partial recording: every good response is appended to a file next to the trace as it arrives. A recording that
//! ends early, even in a crash, resumes where it stopped, and no prompt is counted twice.
//!
//! The first line is a JSON header with the recording's settings. Frames follow, each with a length, a checksum, and a
//! response keyed by its prompt. A truncated or damaged frame ends the file: everything after it is recorded again. The
//! file is locked while in use, and removed once the trace is written.

use std::collections::HashMap;
use std::fmt::Display;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use semmoe_tables::ModelInfo;
use serde::{Deserialize, Serialize};

use crate::ProfilerError;
use crate::answer::Routed;
use crate::prompts::PromptKey;

const FORMAT: &str = "semmoe.partial.1";
/// Limit on the header line, above any header written here.
const MAX_HEADER_BYTES: u64 = 1 << 20;
/// Frame size limit, above a response with the longest context and the deepest model; a larger length means damage.
const MAX_FRAME_BYTES: u32 = 1 << 30;
/// Size of a frame's fixed fields: prompt key (128-bit hash, occurrence), token count, prompt length.
const HEAD_BYTES: usize = 16 + 4 + 4 + 4;

/// Settings that must be equal to resume a recording.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Settings {
    pub(crate) format: String,
    pub(crate) model: ModelInfo,
    pub(crate) engine: String,
    pub(crate) max_tokens: u32,
    pub(crate) temperature: f32,
}

impl Settings {
    pub(crate) fn new(model: ModelInfo, engine: String, max_tokens: u32, temperature: f32) -> Self {
        Settings { format: FORMAT.to_owned(), model, engine, max_tokens, temperature }
    }
}

/// Returns the path of a trace's partial recording.
pub(crate) fn partial_path(out: &Path) -> PathBuf {
    let mut name = out.as_os_str().to_owned();
    name.push(".partial");
    name.into()
}

/// An open partial recording.
#[derive(Debug)]
pub(crate) struct Journal {
    pub(crate) path: PathBuf,
    file: File,
    /// Offset and length of each response's frame.
    answers: HashMap<PromptKey, (u64, u32)>,
    end: u64,
    row_bytes: usize,
    /// Whether the file is a partial recording with these settings. No other file is ever removed.
    ours: bool,
}

impl Journal {
    /// Resumes an existing partial recording, or starts a new one.
    pub(crate) fn open(out: &Path, settings: &Settings, fresh: bool) -> Result<Self, ProfilerError> {
        let path = partial_path(out);
        let cannot_write = ProfilerError::io(&path, "write");
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let file = file.map_err(&cannot_write)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(cannot_write(std::io::Error::other("another recording is writing to it")));
            }
            Err(TryLockError::Error(error)) => return Err(ProfilerError::io(&path, "lock")(error)),
        }
        if fresh {
            file.set_len(0).map_err(cannot_write)?;
        }
        let row_bytes = settings.model.layers() * usize::from(settings.model.top_k) * 2;
        let mut journal = Journal { path, file, answers: HashMap::new(), end: 0, row_bytes, ours: false };
        journal.read_all(settings)?;
        journal.ours = true;
        Ok(journal)
    }

    /// Number of good responses so far.
    pub(crate) fn len(&self) -> usize {
        self.answers.len()
    }

    pub(crate) fn contains(&self, key: PromptKey) -> bool {
        self.answers.contains_key(&key)
    }

    fn read_all(&mut self, settings: &Settings) -> Result<(), ProfilerError> {
        let io = ProfilerError::io(&self.path, "read");
        let length = self.file.metadata().map_err(&io)?.len();
        let mut reader = BufReader::with_capacity(1 << 20, &self.file);
        let mut header = Vec::new();
        reader.by_ref().take(MAX_HEADER_BYTES).read_until(b'\n', &mut header).map_err(&io)?;
        if !header.ends_with(b"\n") {
            // An incomplete header means that nothing was recorded yet. Files of any other kind are never overwritten.
            if !header.is_empty() && !header.starts_with(b"{\"format\":\"semmoe.partial.") {
                return Err(self.other("its first line is not the header of a partial recording"));
            }
            return self.start(settings);
        }
        let found: Settings = serde_json::from_slice(&header)
            .map_err(|_| self.other("its first line is not the header of a partial recording of this version"))?;
        if let Some(difference) = difference(&found, settings) {
            return Err(self.other(&difference));
        }
        let mut at = header.len() as u64;
        let mut payload = Vec::new();
        while let Some((key, frame)) =
            next_frame(&mut reader, length - at, self.row_bytes, &mut payload).map_err(&io)?
        {
            self.answers.insert(key, (at, frame));
            at += 12 + u64::from(frame);
        }
        drop(reader);
        self.end = at;
        // Remove a partial frame, so that the next frame is readable.
        self.file.set_len(at).map_err(&io)
    }

    fn start(&mut self, settings: &Settings) -> Result<(), ProfilerError> {
        let mut line = serde_json::to_vec(settings).unwrap_or_default();
        line.push(b'\n');
        let empty = self.file.set_len(0).and_then(|()| self.file.rewind());
        let written = empty.and_then(|()| self.file.write_all(&line));
        written.map_err(ProfilerError::io(&self.path, "write"))?;
        self.end = line.len() as u64;
        Ok(())
    }

    fn other(&self, difference: &str) -> ProfilerError {
        ProfilerError::OtherPartial { path: self.path.clone(), difference: difference.to_owned() }
    }

    /// Appends a good response.
    pub(crate) fn append(&mut self, key: PromptKey, routed: &Routed) -> Result<(), ProfilerError> {
        let mut frame = vec![0; 12];
        frame.extend_from_slice(&key.hash.to_le_bytes());
        for number in [key.occurrence, routed.token_ids.len() as u32, routed.prompt_len] {
            frame.extend_from_slice(&number.to_le_bytes());
        }
        routed.token_ids.iter().for_each(|id| frame.extend_from_slice(&id.to_le_bytes()));
        routed.experts.iter().for_each(|id| frame.extend_from_slice(&id.to_le_bytes()));
        let length = (frame.len() - 12) as u32;
        let sum = checksum(&frame[12..]);
        frame[..4].copy_from_slice(&length.to_le_bytes());
        frame[4..12].copy_from_slice(&sum.to_le_bytes());
        let written = self.file.seek(SeekFrom::Start(self.end)).and_then(|_| self.file.write_all(&frame));
        written.map_err(ProfilerError::io(&self.path, "write"))?;
        self.answers.insert(key, (self.end, length));
        self.end += frame.len() as u64;
        Ok(())
    }

    /// Reads a good response back.
    pub(crate) fn read(&mut self, key: PromptKey) -> Result<Option<Routed>, ProfilerError> {
        let Some(&(at, length)) = self.answers.get(&key) else { return Ok(None) };
        let io = ProfilerError::io(&self.path, "read");
        let mut payload = Vec::new();
        self.file.seek(SeekFrom::Start(at)).map_err(&io)?;
        let found = next_frame(&mut self.file, 12 + u64::from(length), self.row_bytes, &mut payload).map_err(&io)?;
        match found {
            Some((found, _)) if found == key => Ok(Some(routed(&payload))),
            _ => Err(io(std::io::Error::other("a response changed after it was written"))),
        }
    }

    /// Removes the partial recording once the trace is written.
    pub(crate) fn remove(mut self) {
        // Makes `drop` remove the file.
        self.answers.clear();
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        if self.ours && self.answers.is_empty() {
            // If this fails, the next run rejects or overwrites the empty recording.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn difference(found: &Settings, wanted: &Settings) -> Option<String> {
    type Setting = fn(&Settings) -> &dyn Display;
    if found.format == wanted.format && found.model != wanted.model {
        return Some(match found.model.check_compatible(&wanted.model) {
            Err(error) => error.to_string(),
            Ok(()) => "the model's tokenizer or number of layers was unknown then, or is unknown now".to_owned(),
        });
    }
    let settings: [(&str, Setting); 4] = [
        ("the format", |settings| &settings.format),
        ("the engine", |settings| &settings.engine),
        ("max_tokens", |settings| &settings.max_tokens),
        ("the temperature", |settings| &settings.temperature),
    ];
    settings.into_iter().find_map(|(what, of)| {
        let (found, wanted) = (of(found).to_string(), of(wanted).to_string());
        (found != wanted).then(|| format!("{what} was {found} and is {wanted} now"))
    })
}

/// FNV-1a: detects torn writes, but not tampering.
fn checksum(bytes: &[u8]) -> u64 {
    let fold = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, fold)
}

/// Reads the next complete frame into `payload` and returns its key and length; `None` at the end of the file or at a
/// damaged frame.
fn next_frame(
    reader: &mut impl Read,
    left: u64,
    row_bytes: usize,
    payload: &mut Vec<u8>,
) -> std::io::Result<Option<(PromptKey, u32)>> {
    let mut head = [0; 12];
    if left < 12 {
        return Ok(None);
    }
    reader.read_exact(&mut head)?;
    let length = word(&head, 0);
    if length > MAX_FRAME_BYTES || u64::from(length) > left - 12 || (length as usize) < HEAD_BYTES {
        return Ok(None);
    }
    payload.clear();
    payload.resize(length as usize, 0);
    reader.read_exact(payload)?;
    let mut sum = [0; 8];
    sum.copy_from_slice(&head[4..]);
    let tokens = word(payload, 20) as usize;
    let expected = tokens.checked_mul(4 + row_bytes).and_then(|bytes| bytes.checked_add(HEAD_BYTES));
    if checksum(payload) != u64::from_le_bytes(sum) || expected != Some(payload.len()) {
        return Ok(None);
    }
    let mut hash = [0; 16];
    hash.copy_from_slice(&payload[..16]);
    Ok(Some((PromptKey { hash: u128::from_le_bytes(hash), occurrence: word(payload, 16) }, length)))
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Decodes a payload whose length was validated.
fn routed(payload: &[u8]) -> Routed {
    let tokens = word(payload, 20) as usize;
    let (ids, experts) = payload[HEAD_BYTES..].split_at(tokens * 4);
    Routed {
        prompt_len: word(payload, 24),
        token_ids: ids.chunks_exact(4).map(|id| word(id, 0)).collect(),
        experts: experts.chunks_exact(2).map(|id| u16::from_le_bytes([id[0], id[1]])).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        let model = ModelInfo {
            model: "tiny".into(),
            tokenizer_sha256: None,
            num_experts: 4,
            top_k: 1,
            vocab_size: 10,
            num_hidden_layers: 2,
            layer_ids: vec![0, 1],
        };
        Settings::new(model, "vllm".into(), 1, 0.0)
    }

    fn key(hash: u128) -> PromptKey {
        PromptKey { hash, occurrence: 3 }
    }

    fn answer(n: u32) -> Routed {
        Routed { token_ids: (0..n).collect(), prompt_len: n / 2, experts: (0..2 * n).map(|i| (i % 4) as u16).collect() }
    }

    #[test]
    fn a_file_cut_anywhere_keeps_its_whole_answers() {
        let directory = tempfile::tempdir().unwrap();
        let out = directory.path().join("t");
        let path = partial_path(&out);
        let mut journal = Journal::open(&out, &settings(), false).unwrap();
        let start = journal.end as usize;
        let mut ends = Vec::new();
        for n in 0..4 {
            journal.append(key(n.into()), &answer(n)).unwrap();
            ends.push(journal.end as usize);
        }
        drop(journal);
        let whole = std::fs::read(&path).unwrap();
        for cut in start..=whole.len() {
            for flip in [false, true] {
                let mut bytes = whole[..cut].to_vec();
                // Corrupts a byte of the last frame, too.
                let good = ends.iter().filter(|&&end| end <= cut).count();
                let good = if flip && good > 0 && ends[good - 1] == cut { good - 1 } else { good };
                if flip && cut > start {
                    bytes[cut - 1] ^= 1;
                }
                std::fs::write(&path, &bytes).unwrap();
                let mut journal = Journal::open(&out, &settings(), false).unwrap();
                assert_eq!(journal.len(), good, "{cut} {flip}");
                journal.append(key(99), &answer(2)).unwrap();
                for n in 0..4u32 {
                    let expected = ((n as usize) < good).then(|| answer(n));
                    assert_eq!(journal.read(key(n.into())).unwrap(), expected);
                }
                assert_eq!(journal.read(key(99)).unwrap(), Some(answer(2)));
                drop(journal);
                assert_eq!(Journal::open(&out, &settings(), false).unwrap().len(), good + 1);
            }
        }
    }

    #[test]
    fn other_recordings_and_other_files_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let out = directory.path().join("t");
        let mut journal = Journal::open(&out, &settings(), false).unwrap();
        journal.append(key(1), &answer(1)).unwrap();
        let error = Journal::open(&out, &settings(), false).unwrap_err().to_string();
        assert!(error.contains("another recording is writing to it"), "{error}");
        drop(journal);
        let refused = |settings: &Settings| Journal::open(&out, settings, false).unwrap_err().to_string();
        let error = refused(&Settings { max_tokens: 5, ..settings() });
        assert!(error.contains("max_tokens was 1 and is 5 now"), "{error}");
        let model = ModelInfo { top_k: 2, ..settings().model };
        assert!(refused(&Settings { model, ..settings() }).contains("`top_k`"));
        assert!(refused(&Settings { engine: "sglang".into(), ..settings() }).contains("the engine was vllm"));
        assert_eq!(Journal::open(&out, &settings(), false).unwrap().len(), 1);
        // Restarted, and removed since it is empty.
        drop(Journal::open(&out, &Settings { max_tokens: 5, ..settings() }, true).unwrap());
        assert!(!partial_path(&out).exists());
        for text in ["notes", "notes\n", "{}\n"] {
            std::fs::write(partial_path(&out), text).unwrap();
            assert!(refused(&settings()).contains("its first line is not the header of a partial recording"));
            std::fs::remove_file(partial_path(&out)).ok();
        }
    }
}
