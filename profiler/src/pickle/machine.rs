//! The opcodes of a pickle, one after the other, on a bounded stack.

use super::PickleError;
use super::call;
use super::error::shown;
use super::opcode;
use super::value::{Document, Value};

/// More than Python's pickler ever puts there: it writes lists in pieces of a thousand.
const MAX_STACK: usize = 1 << 14;

/// Reads a pickle. `file_bytes` is the size of the file that it is in, which bounds the memory; `bytes_of` returns the
/// bytes of a storage by its key.
///
/// # Errors
/// Names the first thing that is not read, or not well formed, and where it is.
pub fn read_pickle(
    pickle: Vec<u8>,
    file_bytes: u64,
    bytes_of: &dyn Fn(&[u8]) -> Option<u64>,
) -> Result<Document, PickleError> {
    if u32::try_from(pickle.len()).is_err() {
        return Err(PickleError::Memory { limit: u32::MAX.into() });
    }
    let document = Document::new(pickle, file_bytes);
    let mut machine = Machine { document, at: 0, stack: Vec::new(), marks: Vec::new(), memo: Vec::new() };
    while machine.step(bytes_of)? {}
    Ok(machine.document)
}

struct Machine {
    document: Document,
    /// The next byte.
    at: usize,
    stack: Vec<Value>,
    /// Heights of the stack.
    marks: Vec<usize>,
    memo: Vec<Value>,
}

impl Machine {
    /// One opcode; false after the last.
    fn step(&mut self, bytes_of: &dyn Fn(&[u8]) -> Option<u64>) -> Result<bool, PickleError> {
        let start = self.at;
        let opcode = self.take::<1>()?[0];
        match opcode {
            b'.' => return self.stop(start),
            0x80 => self.protocol(start)?,
            // Frames only help to read ahead.
            0x95 => {
                self.take::<8>()?;
            }
            b'(' => self.mark(start)?,
            b'N' => self.push(Value::None)?,
            0x88 => self.push(Value::Bool(true))?,
            0x89 => self.push(Value::Bool(false))?,
            b'J' | b'K' | b'M' | 0x8a | b'G' => self.number(opcode, start)?,
            b'X' | 0x8c => self.text(opcode)?,
            b'}' => self.document.add_dict().and_then(|dict| self.push(dict))?,
            b']' => self.document.add_sequence(&[]).and_then(|list| self.push(Value::List(list)))?,
            b')' => self.tuple(0, start)?,
            0x85..=0x87 => self.tuple(usize::from(opcode - 0x84), start)?,
            b't' => {
                let count = self.above_mark(start)?;
                self.tuple(count, start)?;
            }
            b'a' => self.append(1, start)?,
            b's' => self.set(2, start)?,
            b'e' => {
                let count = self.above_mark(start)?;
                self.append(count, start)?;
            }
            b'u' => {
                let count = self.above_mark(start)?;
                self.set(count, start)?;
            }
            b'q' | b'r' | 0x94 | b'h' | b'j' => self.memo(opcode, start)?,
            b'c' | 0x93 => self.global(opcode, start)?,
            b'R' => {
                let arguments = self.pop(start)?;
                let function = self.pop(start)?;
                call::reduce(&mut self.document, function, arguments, start).and_then(|value| self.push(value))?;
            }
            b'Q' => {
                let id = self.pop(start)?;
                call::persistent(&mut self.document, id, start, bytes_of).and_then(|value| self.push(value))?;
            }
            other => return Err(PickleError::Opcode { name: opcode::name(other), at: start }),
        }
        Ok(true)
    }

    fn stop(&mut self, start: usize) -> Result<bool, PickleError> {
        let root = self.pop(start)?;
        if !self.stack.is_empty() || !self.marks.is_empty() {
            return Err(wrong("end", start, format!("{} values too early", self.stack.len()), "one value in all"));
        }
        self.document.set_root(root);
        Ok(false)
    }

    fn protocol(&mut self, start: usize) -> Result<(), PickleError> {
        match self.take::<1>()? {
            [2..=5] => Ok(()),
            [other] => Err(wrong("protocol", start, other.to_string(), "2 to 5")),
        }
    }

    fn number(&mut self, opcode: u8, start: usize) -> Result<(), PickleError> {
        let value = match opcode {
            b'J' => Value::Int(i32::from_le_bytes(self.take()?).into()),
            b'K' => Value::Int(self.take::<1>()?[0].into()),
            b'M' => Value::Int(u16::from_le_bytes(self.take()?).into()),
            b'G' => Value::Float(f64::from_be_bytes(self.take()?)),
            _ => Value::Int(self.long(start)?),
        };
        self.push(value)
    }

    /// An integer of up to eight bytes, little-endian, in two's complement.
    fn long(&mut self, start: usize) -> Result<i64, PickleError> {
        let length = usize::from(self.take::<1>()?[0]);
        if length > 8 {
            return Err(wrong("integer", start, format!("{length} bytes long"), "at most 8 bytes"));
        }
        let from = self.skip(length)?;
        let bytes = &self.document.pickle()[from..from + length];
        let fill = if bytes.last().is_some_and(|top| *top >= 0x80) { 0xff } else { 0 };
        let mut word = [fill; 8];
        word[..length].copy_from_slice(bytes);
        Ok(i64::from_le_bytes(word))
    }

    fn text(&mut self, opcode: u8) -> Result<(), PickleError> {
        let length =
            if opcode == b'X' { u32::from_le_bytes(self.take()?) as usize } else { self.take::<1>()?[0].into() };
        let from = self.skip(length)?;
        self.push(Document::text_at(from, length))
    }

    fn tuple(&mut self, count: usize, start: usize) -> Result<(), PickleError> {
        let first = self.first_of(count, start)?;
        let tuple = self.document.add_sequence(&self.stack[first..])?;
        self.stack.truncate(first);
        self.push(Value::Tuple(tuple))
    }

    fn append(&mut self, count: usize, start: usize) -> Result<(), PickleError> {
        let first = self.first_of(count, start)?;
        let list = self.below(first, start)?;
        if !self.document.extend(list, &self.stack[first..])? {
            return Err(wrong("target", start, Document::kind(list).into(), "a list"));
        }
        self.stack.truncate(first);
        Ok(())
    }

    fn set(&mut self, count: usize, start: usize) -> Result<(), PickleError> {
        let first = self.first_of(count, start)?;
        let dict = self.below(first, start)?;
        if !self.document.set(dict, &self.stack[first..])? {
            return Err(wrong("target", start, Document::kind(dict).into(), "a dict, and keys with values"));
        }
        self.stack.truncate(first);
        Ok(())
    }

    /// Numbers of the memo are dense, as every pickler writes them; so it is never larger than what was put there.
    fn memo(&mut self, opcode: u8, start: usize) -> Result<(), PickleError> {
        let at = match opcode {
            b'q' | b'h' => self.take::<1>()?[0].into(),
            b'r' | b'j' => u32::from_le_bytes(self.take()?) as usize,
            _ => self.memo.len(),
        };
        if matches!(opcode, b'h' | b'j') {
            let found = self.memo.get(at).copied();
            let value = found
                .ok_or_else(|| wrong("memo", start, format!("asked for its number {at}"), "one that was put there"))?;
            return self.push(value);
        }
        let value = *self.stack.last().ok_or_else(|| empty(start))?;
        if at > self.memo.len() {
            return Err(wrong("memo", start, format!("given the number {at}"), "the next number"));
        }
        if at == self.memo.len() {
            self.document.spend::<Value>(1)?;
            self.memo.push(value);
        }
        self.memo[at] = value;
        Ok(())
    }

    fn global(&mut self, opcode: u8, start: usize) -> Result<(), PickleError> {
        let value = if opcode == b'c' {
            let (module, name) = (self.line(start)?, self.line(start)?);
            call::global(&self.document.pickle()[module], &self.document.pickle()[name], start)?
        } else {
            let (name, module) = (self.pop(start)?, self.pop(start)?);
            let (Value::Text(module), Value::Text(name)) = (module, name) else {
                return Err(wrong("name", start, Document::kind(name).into(), "two texts"));
            };
            call::global(self.document.text(module), self.document.text(name), start)?
        };
        self.push(value)
    }

    /// The bytes up to the next line feed.
    fn line(&mut self, start: usize) -> Result<std::ops::Range<usize>, PickleError> {
        let rest = &self.document.pickle()[self.at..];
        let length = rest.iter().position(|byte| *byte == b'\n');
        let length = length.ok_or_else(|| wrong("name", start, shown(rest), "a line"))?;
        let from = self.skip(length + 1)?;
        Ok(from..from + length)
    }

    fn mark(&mut self, start: usize) -> Result<(), PickleError> {
        if self.marks.len() == MAX_STACK {
            return Err(wrong("stack", start, format!("{MAX_STACK} marks deep"), "less"));
        }
        self.marks.push(self.stack.len());
        Ok(())
    }

    /// How many values lie above the last mark, which is taken off.
    fn above_mark(&mut self, start: usize) -> Result<usize, PickleError> {
        let mark = self.marks.pop().ok_or_else(|| wrong("mark", start, "missing".into(), "one"))?;
        Ok(self.stack.len() - mark)
    }

    /// Where the uppermost `count` values begin. None of them lies below a mark that is still to come.
    fn first_of(&self, count: usize, start: usize) -> Result<usize, PickleError> {
        let floor = self.marks.last().copied().unwrap_or(0);
        self.stack.len().checked_sub(count).filter(|first| *first >= floor).ok_or_else(|| empty(start))
    }

    /// The value under the one at `first`.
    fn below(&self, first: usize, start: usize) -> Result<Value, PickleError> {
        let floor = self.marks.last().copied().unwrap_or(0);
        first.checked_sub(1).filter(|at| *at >= floor).map(|at| self.stack[at]).ok_or_else(|| empty(start))
    }

    fn push(&mut self, value: Value) -> Result<(), PickleError> {
        if self.stack.len() == MAX_STACK {
            return Err(wrong("stack", self.at, format!("{MAX_STACK} values deep"), "less"));
        }
        self.stack.push(value);
        Ok(())
    }

    fn pop(&mut self, start: usize) -> Result<Value, PickleError> {
        let first = self.first_of(1, start)?;
        let value = self.stack[first];
        self.stack.truncate(first);
        Ok(value)
    }

    fn take<const W: usize>(&mut self) -> Result<[u8; W], PickleError> {
        let from = self.skip(W)?;
        let mut word = [0; W];
        word.copy_from_slice(&self.document.pickle()[from..from + W]);
        Ok(word)
    }

    /// Passes over bytes, and gives where they began.
    fn skip(&mut self, length: usize) -> Result<usize, PickleError> {
        let (from, all) = (self.at, self.document.pickle().len());
        if length > all - from {
            let (found, expected) = ((all - from) as u64, length as u64);
            return Err(PickleError::Short { what: "the pickle", found, expected });
        }
        self.at += length;
        Ok(from)
    }
}

fn wrong(what: &'static str, at: usize, found: String, expected: &'static str) -> PickleError {
    PickleError::Pickle { what, at, found, expected }
}

fn empty(at: usize) -> PickleError {
    wrong("stack", at, "empty".into(), "a value")
}
