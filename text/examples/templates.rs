//! The cost of rendering a plain chat: `templates [FILE.jinja...]`.
//!
//! Without files ChatML, which the bundled model has. Chats have 1, 3 and 9 messages of 400 bytes. Each pass renders a
//! chat 100 times; printed are medians over the passes.

use std::error::Error;
use std::fmt::Write as _;
use std::io::Write as _;
use std::time::Instant;

use semmoe_text::{Budget, ChatTemplate, PlainChat};
use serde_json::Value;

const PASSES: usize = 200;
const RENDERED: u32 = 100;
const CHATML: &str = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}\
     {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

fn main() -> Result<(), Box<dyn Error>> {
    let mut templates = vec![("ChatML".to_owned(), CHATML.to_owned())];
    for path in std::env::args().skip(1) {
        templates.push((path.clone(), std::fs::read_to_string(path)?));
    }
    for (name, source) in templates {
        let template = ChatTemplate::from_source(&source, &Value::Null, || 0)?;
        print(&name)?;
        for messages in [1, 3, 9] {
            let body = body(messages);
            let (chat, _) = PlainChat::quickly(&body).ok_or("no plain chat")?;
            let mut times = Vec::new();
            for _ in 0..PASSES {
                let begin = Instant::now();
                for _ in 0..RENDERED {
                    std::hint::black_box(template.render_plain(&chat, Budget::default())?);
                }
                times.push(begin.elapsed().as_secs_f64() * 1e6 / f64::from(RENDERED));
            }
            times.sort_by(f64::total_cmp);
            print(&format!("  {messages} messages: {:.2} us", times[times.len() / 2]))?;
        }
    }
    Ok(())
}

/// A request of alternating messages.
fn body(messages: usize) -> String {
    let mut list = String::new();
    for at in 0..messages {
        let role = if at % 2 == 0 { "user" } else { "assistant" };
        let content = "Which rivers flow through this town? ".repeat(11);
        let _ = write!(list, "{}{{\"role\":\"{role}\",\"content\":\"{content}\"}}", if at == 0 { "" } else { "," });
    }
    format!("{{\"messages\":[{list}]}}")
}

fn print(line: &str) -> std::io::Result<()> {
    writeln!(std::io::stdout(), "{line}")
}
