//! Bodies as read by Python's `json.loads`, which SGLang's and vLLM's servers use: whatever it accepts as an object is
//! an object to the gateway too, without pins, or is refused. Recorded with CPython 3.

use bytes::Bytes;
use semmoe_engines::json::{Encoding, NotEncoded, begins_object};
use semmoe_engines::pin::Stripped;

/// A description, the bytes, and whether `json.loads` reads an object.
const TABLE: &[(&str, &[u8], bool)] = &[
    ("plain", b"{\"data_parallel_rank\":1}", true),
    ("UTF-8 with a byte order mark", b"\xef\xbb\xbf{\"data_parallel_rank\":1}", true),
    ("two byte order marks", b"\xef\xbb\xbf\xef\xbb\xbf{\"data_parallel_rank\":1}", false),
    ("blanks before a byte order mark", b" \xef\xbb\xbf{\"data_parallel_rank\":1}", false),
    ("UTF-16 little endian", b"{\x00\"\x00d\x00a\x00t\x00a\x00_\x00p\x00a\x00r\x00a\x00l\x00l\x00e\x00l\x00_\x00r\x00a\x00n\x00k\x00\"\x00:\x001\x00}\x00", true),
    ("UTF-16 big endian", b"\x00{\x00\"\x00d\x00a\x00t\x00a\x00_\x00p\x00a\x00r\x00a\x00l\x00l\x00e\x00l\x00_\x00r\x00a\x00n\x00k\x00\"\x00:\x001\x00}", true),
    ("UTF-16 with a mark, little endian", b"\xff\xfe{\x00\"\x00d\x00a\x00t\x00a\x00_\x00p\x00a\x00r\x00a\x00l\x00l\x00e\x00l\x00_\x00r\x00a\x00n\x00k\x00\"\x00:\x001\x00}\x00", true),
    ("UTF-16 with a mark, big endian", b"\xfe\xff\x00{\x00\"\x00d\x00a\x00t\x00a\x00_\x00p\x00a\x00r\x00a\x00l\x00l\x00e\x00l\x00_\x00r\x00a\x00n\x00k\x00\"\x00:\x001\x00}", true),
    ("UTF-16 with blanks before", b" \x00\x0a\x00\x09\x00{\x00\"\x00d\x00a\x00t\x00a\x00_\x00p\x00a\x00r\x00a\x00l\x00l\x00e\x00l\x00_\x00r\x00a\x00n\x00k\x00\"\x00:\x001\x00}\x00", true),
    ("UTF-32 little endian", b"{\x00\x00\x00\"\x00\x00\x00d\x00\x00\x00a\x00\x00\x00t\x00\x00\x00a\x00\x00\x00_\x00\x00\x00p\x00\x00\x00a\x00\x00\x00r\x00\x00\x00a\x00\x00\x00l\x00\x00\x00l\x00\x00\x00e\x00\x00\x00l\x00\x00\x00_\x00\x00\x00r\x00\x00\x00a\x00\x00\x00n\x00\x00\x00k\x00\x00\x00\"\x00\x00\x00:\x00\x00\x001\x00\x00\x00}\x00\x00\x00", true),
    ("UTF-32 big endian", b"\x00\x00\x00{\x00\x00\x00\"\x00\x00\x00d\x00\x00\x00a\x00\x00\x00t\x00\x00\x00a\x00\x00\x00_\x00\x00\x00p\x00\x00\x00a\x00\x00\x00r\x00\x00\x00a\x00\x00\x00l\x00\x00\x00l\x00\x00\x00e\x00\x00\x00l\x00\x00\x00_\x00\x00\x00r\x00\x00\x00a\x00\x00\x00n\x00\x00\x00k\x00\x00\x00\"\x00\x00\x00:\x00\x00\x001\x00\x00\x00}", true),
    ("UTF-32 with a mark, little endian", b"\xff\xfe\x00\x00{\x00\x00\x00\"\x00\x00\x00d\x00\x00\x00a\x00\x00\x00t\x00\x00\x00a\x00\x00\x00_\x00\x00\x00p\x00\x00\x00a\x00\x00\x00r\x00\x00\x00a\x00\x00\x00l\x00\x00\x00l\x00\x00\x00e\x00\x00\x00l\x00\x00\x00_\x00\x00\x00r\x00\x00\x00a\x00\x00\x00n\x00\x00\x00k\x00\x00\x00\"\x00\x00\x00:\x00\x00\x001\x00\x00\x00}\x00\x00\x00", true),
    ("UTF-32 with a mark, big endian", b"\x00\x00\xfe\xff\x00\x00\x00{\x00\x00\x00\"\x00\x00\x00d\x00\x00\x00a\x00\x00\x00t\x00\x00\x00a\x00\x00\x00_\x00\x00\x00p\x00\x00\x00a\x00\x00\x00r\x00\x00\x00a\x00\x00\x00l\x00\x00\x00l\x00\x00\x00e\x00\x00\x00l\x00\x00\x00_\x00\x00\x00r\x00\x00\x00a\x00\x00\x00n\x00\x00\x00k\x00\x00\x00\"\x00\x00\x00:\x00\x00\x001\x00\x00\x00}", true),
    ("escapes in the key", b"{\"\\u0064ata_parallel_rank\":1}", true),
    ("upper case digits in an escape", b"{\"data\\u005Fparallel_rank\":1}", true),
    ("the key twice", b"{\"data_parallel_rank\":null,\"data_parallel_rank\":1}", true),
    ("NaN and Infinity", b"{\"a\":NaN,\"b\":-Infinity,\"data_parallel_rank\":1}", true),
    ("surrogates in UTF-8", b"{\"a\":\"\xed\xa0\x80\",\"data_parallel_rank\":1}", true),
    ("blanks around", b" \x0d\x0a\x09{ \"data_parallel_rank\" : 1 } \x0a", true),
    ("a vertical tab before", b"\x0b{\"data_parallel_rank\":1}", false),
    ("a form feed before", b"\x0c{\"data_parallel_rank\":1}", false),
    ("a zero byte before", b"\x00{\"data_parallel_rank\":1}", false),
    ("a zero byte behind", b"{\"data_parallel_rank\":1}\x00", false),
    ("text behind", b"{\"data_parallel_rank\":1} x", false),
    ("two objects", b"{\"data_parallel_rank\":1}{\"data_parallel_rank\":1}", false),
    ("a comment", b"/**/{\"data_parallel_rank\":1}", false),
    ("single quotes", b"{'data_parallel_rank':1}", false),
    ("no quotes", b"{data_parallel_rank:1}", false),
    ("a comma too many", b"{\"data_parallel_rank\":1,}", false),
    ("a control character in a string", b"{\"a\":\"\x01\",\"data_parallel_rank\":1}", false),
    ("a list", b"[{\"data_parallel_rank\":1}]", false),
    ("a string that holds one", b"\"{\\\"data_parallel_rank\\\":1}\"", false),
    ("empty", b"", false),
    ("one brace", b"{", false),
    ("two bytes of UTF-16", b"{\x00", false),
    ("an MP4 file", b"\x00\x00\x00 ftypisom\x00\x00\x02\x00", false),
    ("an MP3 file", b"\xff\xfb\x90D\x00\x00\x00\x00", false),
    ("a gzip stream", b"\x1f\x8b\x08\x00\x00\x00\x00\x00", false),
    ("a form with parts", b"--b\x0d\x0acontent-disposition: form-data; name=\"model\"\x0d\x0a\x0d\x0atiny\x0d\x0a--b--\x0d\x0a", false),
    ("UTF-16 with half a unit", b"\xff\xfe{\x00\"\x00d\x00a\x00t\x00a\x00_\x00p\x00a\x00r\x00a\x00l\x00l\x00e\x00l\x00_\x00r\x00a\x00n\x00k\x00\"\x00:\x001\x00}\x00x", false),
    ("UTF-16 with a lone surrogate", b"\xff\xfe{\x00\"\x00a\x00\"\x00:\x00\"\x00\x00\xd8\"\x00,\x00\"\x00d\x00a\x00t\x00a\x00_\x00p\x00a\x00r\x00a\x00l\x00l\x00e\x00l\x00_\x00r\x00a\x00n\x00k\x00\"\x00:\x001\x00}\x00", true),
];

/// The body as the gateway reads it: UTF-8 without a mark.
fn plain(body: &[u8]) -> Result<Bytes, NotEncoded> {
    match Encoding::of(body) {
        (Encoding::Utf8, start) => Ok(Bytes::copy_from_slice(&body[start..])),
        (encoding, start) => encoding.characters(&body[start..]).collect::<Result<String, _>>().map(Bytes::from),
    }
}

#[test]
fn what_an_engine_reads_as_an_object_is_read_or_refused() {
    let nested = [&b"{\"a\":"[..], &[b'['; 600], &[b']'; 600], b",\"data_parallel_rank\":1}"].concat();
    for (name, body, is_object) in TABLE.iter().copied().chain([("nested 600 deep", nested.as_slice(), true)]) {
        let stripped = plain(body).map(|body| Stripped::new(&body));
        let is_read = matches!(stripped, Ok(Ok(_)));
        // Lone surrogates and excessive nesting are refused.
        let is_exempt = name.contains("lone surrogate") || name.contains("deep");
        assert!(!is_object || is_read != is_exempt, "{name}");
        assert!(is_read || !is_object || begins_object(body), "{name}: Python reads it, and it would pass as it is");
        if let Ok(Ok(stripped)) = stripped {
            let text = String::from_utf8_lossy(stripped.bytes()).replace("\\u0064", "d").replace("\\u005F", "_");
            assert!(!text.contains("data_parallel_rank"), "{name}: {text}");
        }
    }
}

#[test]
fn what_is_no_json_passes_as_it_is() {
    for name in ["an MP4 file", "an MP3 file", "a gzip stream", "a form with parts", "empty", "a list"] {
        let (_, body, _) = TABLE.iter().find(|row| row.0 == name).unwrap();
        assert!(!begins_object(body), "{name}");
    }
}
