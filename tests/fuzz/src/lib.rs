//! Laws over untrusted bytes. Each function takes arbitrary bytes, and panics if they break its law.
//!
//! The targets in `targets/` run them under libFuzzer; the tests here run them on seeds and mutations of seeds, so
//! every test run compiles and runs what a fuzzer would. See README.md.

mod answers;
mod arrays;
mod events;
mod files;
mod ids;
mod prompts;
mod splice;

pub use answers::answers;
pub use arrays::arrays;
pub use events::events;
pub use files::files;
pub use ids::ids;
pub use prompts::{requests, templates, tokens};
pub use splice::splice;

/// Takes arbitrary bytes; panics if they break it.
pub type Law = fn(&[u8]);

/// The targets by name.
pub const TARGETS: [(&str, Law); 9] = [
    ("requests", requests),
    ("templates", templates),
    ("tokens", tokens),
    ("splice", splice),
    ("ids", ids),
    ("events", events),
    ("answers", answers),
    ("files", files),
    ("arrays", arrays),
];

/// A JSON object with its members in order, duplicates included.
struct Ordered(Vec<(String, serde_json::Value)>);

impl<'de> serde::Deserialize<'de> for Ordered {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = Ordered;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Ordered, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Ordered(members))
            }
        }
        deserializer.deserialize_map(Visitor)
    }
}
