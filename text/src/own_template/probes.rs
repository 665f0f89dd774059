//! Chats on which a template must be rendered alike before it is rendered without the library.

use crate::chat::{PlainChat, PlainMessage};

/// Chats put together at random, with a fixed seed.
const RANDOM_CHATS: usize = 200;
const MAX_MESSAGES: usize = 7;
/// Texts of a template that are longer name no role.
const MAX_ROLE_BYTES: usize = 24;

const ROLES: [&str; 6] = ["user", "assistant", "system", "tool", "developer", "User"];
const CONTENTS: [&str; 10] =
    ["", "a", " a ", "\n", "\n\na b\n", "<think>\na\n</think>\n\nb", "a</think>", "é\u{a0}中", "{{ x }}", "\u{0}'\""];

/// The chats for a template that has these texts in it, always the same ones.
pub(crate) fn probes(texts: &[String]) -> Vec<PlainChat<'_>> {
    let mut random = fastrand::Rng::with_seed(0x7e3a);
    let roles: Vec<&str> =
        ROLES.into_iter().chain(texts.iter().map(String::as_str).filter(|text| text.len() <= MAX_ROLE_BYTES)).collect();
    let mut chats: Vec<PlainChat<'_>> = Vec::with_capacity(RANDOM_CHATS + 3);
    for roles in [&["user"][..], &["system", "user"], &["user", "assistant", "user"]] {
        let message =
            |role: &&'static str| PlainMessage { role: (*role).into(), content: "a".into(), content_first: false };
        chats.push(PlainChat { messages: roles.iter().map(message).collect() });
    }
    for _ in 0..RANDOM_CHATS {
        let message = |random: &mut fastrand::Rng| {
            // Most roles are the usual ones, or few chats would come far.
            let role = if random.u8(0..4) > 0 { ROLES[random.usize(..3)] } else { roles[random.usize(..roles.len())] };
            let content = content(random, texts);
            PlainMessage { role: role.into(), content: content.into(), content_first: random.bool() }
        };
        chats.push(PlainChat { messages: (0..random.usize(1..=MAX_MESSAGES)).map(|_| message(&mut random)).collect() });
    }
    chats
}

/// A text such as the template may look for.
fn content(random: &mut fastrand::Rng, texts: &[String]) -> String {
    let mut content = String::new();
    for _ in 0..random.usize(0..4) {
        let known = texts.len() * random.usize(0..2);
        match random.usize(0..CONTENTS.len() + known) {
            own if own < CONTENTS.len() => content.push_str(CONTENTS[own]),
            text => content.push_str(&texts[text - CONTENTS.len()]),
        }
    }
    content
}
