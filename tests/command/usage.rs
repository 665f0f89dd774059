//! In every subcommand wrong arguments and input exit with code 2, as docs/api.md says; failures of the machine or of a
//! server with 1.

use crate::mistakes::Desk;
use crate::support::{describe, run};

const BACKEND: &str = "[[models.backends]]\nname = \"a\"\nengine = \"sglang\"\n";

/// Files of the desk, each with one defect, by name.
fn wrong_files(desk: &Desk) {
    let model = |more: &str| format!("[[models]]\nname = \"m\"\npolicy = \"round_robin\"\n{more}\n{BACKEND}");
    let url = "url = \"http://127.0.0.1:1\"\n";
    for (name, text) in [
        ("text.toml", "not TOML".to_owned()),
        ("no-key.toml", model("") + url + "api_key_file = \"/nowhere\"\n"),
        ("no-ca.toml", model("") + "url = \"https://127.0.0.1:1\"\ntls = { ca = \"/nowhere\" }\n"),
        ("no-cert.toml", "[server]\ntls = { cert = \"/nowhere\", key = \"/nowhere\" }\n".to_owned() + &model("") + url),
        ("policy.toml", model("") + url + "[routing.settings]\ncommunication = -1.0\n"),
        ("bad.jsonl", "not JSON\n".to_owned()),
        ("empty.jsonl", String::new()),
    ] {
        std::fs::write(desk.path(name), text).expect("written");
    }
}

/// Command lines; `@name` is a file of the desk, `O` stands for `--out @o`.
const WRONG: &str = "
nonsense
up --model /nowhere
up --ranks 3
up --ranks 65
up --redundant 5
up --port 65535
up --plan /nowhere
up --plan @text.toml
up --json
serve
serve --config /nowhere
serve --config @
serve --config @text.toml
serve --config @no-key.toml
serve --config @no-ca.toml
serve --config @no-cert.toml
serve --config @policy.toml
serve --config @key.toml --watch --check
serve --engine sglang --url ftp://127.0.0.1 --model m
serve --engine sglang --url http://127.0.0.1:1 --model m --listen 127.0.0.1
keys hash
worker --model /nowhere --rank 0 --world 1 --rendezvous 127.0.0.1:0
worker --model $MODEL --rank 1 --world 1 --rendezvous 127.0.0.1:0
worker --model $MODEL --rank 0 --world 3 --rendezvous 127.0.0.1:0
worker --model $MODEL --rank 0 --world 1 --rendezvous nowhere
worker --model $MODEL --rank 0 --world 1 --rendezvous 127.0.0.1:0 --listen nowhere
worker --model $MODEL --rank 0 --world 1 --rendezvous 127.0.0.1:0 --listen 127.0.0.1:0 --tables $TRACE
worker --model $MODEL --rank 0 --world 1 --rendezvous 127.0.0.1:0 --listen 127.0.0.1:0 --tables @m.tables
worker --model $MODEL --rank 0 --world 1 --rendezvous 127.0.0.1:0 --listen 127.0.0.1:0 --dtype f32
worker --model $MODEL --world 2 --ranks-here 2
worker --model $MODEL --world 2
worker --model $MODEL --world 2 --device cpu
worker --model $MODEL --world 2 --device cuda
worker --model $MODEL --world 9 --device cuda
worker --model $MODEL --world 2 --ranks-here 1 --device cuda
worker --model $MODEL --world 4 --rank 1 --rendezvous 127.0.0.1:0 --ranks-here 2 --device cuda
worker --model $MODEL --rank 0 --world 1 --rendezvous 127.0.0.1:0 --gpu 0
worker --model $MODEL --world 2 --ranks-here 9 --device cuda
worker --model $MODEL --world 2 --ranks-here 2 --device cuda --dtype f16
worker --model $MODEL --world 2 --ranks-here 2 --device cuda --wire bf16
worker --model $MODEL --world 2 --ranks-here 2 --device cuda --attention dp,tp
profile record --engine sglang --url nowhere --prompts @prompts.jsonl O
profile record --engine openai --url http://127.0.0.1:1 --prompts @prompts.jsonl O
profile record --engine sglang --url http://127.0.0.1:1 --prompts /nowhere O
profile record --engine sglang --url http://127.0.0.1:1 --prompts @prompts.jsonl --tokenizer /nowhere O
profile record --engine sglang --url http://127.0.0.1:1 --prompts @prompts.jsonl --model-config /nowhere O
profile record --engine sglang --url http://127.0.0.1:1 --prompts @prompts.jsonl --api-key-file /nowhere O
profile record --engine sglang --url http://127.0.0.1:1 --prompts @prompts.jsonl --max-bad 7 O
profile record --engine sglang --url http://127.0.0.1:1 --prompts @prompts.jsonl --rate 0 O
profile record --engine sglang --url http://127.0.0.1:1 --prompts @prompts.jsonl --out @prompts.jsonl
profile import --format sglang --model m --model-config /nowhere O /nowhere
profile import --format sglang --model m --model-config $MODEL O /nowhere
profile import --format routes --model m --model-config $MODEL O @prompts.jsonl
profile build O
profile build /nowhere O
profile build @prompts.jsonl O
profile build $TRACE --out $TRACE
profile build $TRACE --hold-out 2 --hold-out-trace @h O
profile merge @p.profile /nowhere O
profile merge @p.profile $TRACE O
profile show /nowhere
profile show @m.tables
profile show $TRACE --tables $TRACE
profile show $TRACE --tokenizer /nowhere
profile show $TRACE --groups 0
solve --profile /nowhere --groups 4 O
solve --profile @p.profile --groups 0 O
solve --profile @p.profile --groups 5 O
solve --profile @p.profile --groups 4 --trace /nowhere O
solve --profile @p.profile --groups 4 --trace @p.profile O
solve --profile @p.profile --groups 4 --warm-start /nowhere O
solve --profile @p.profile --groups 4 --placement nonsense O
solve --profile @p.profile --groups 4 --tokenizer /nowhere O
solve --profile @p.profile --groups 4 --embeddings /nowhere O
solve --profile @p.profile --groups 4 --nodes 3 O
solve --profile @p.profile --groups 4 --redundant 5 O
solve --profile @p.profile --groups 4 --hold-out 0.9 O
solve --profile @p.profile --groups 4 --time-limit=-1 O
solve --profile @p.profile --groups 4 --objective ranks O
evaluate --tables /nowhere --trace $TRACE
evaluate --tables @m.tables --trace /nowhere
evaluate --tables @m.tables --trace $TRACE --policies nonsense
evaluate --tables @m.tables --trace $TRACE --concurrency 0
tables show /nowhere
tables show $TRACE
tables verify /nowhere
tables verify @prompts.jsonl
tables export --tables /nowhere --format sglang
tables export --tables @m.tables --format nonsense
tables permute --tables /nowhere --checkpoint $MODEL O
tables permute --tables @m.tables --checkpoint /nowhere O
plan --model /nowhere --cluster /nowhere --workload /nowhere
plan --model $MODEL/config.json --cluster @text.toml --workload @text.toml
load --url nowhere --prompts @prompts.jsonl --concurrency 1 --requests 1
load --url http://127.0.0.1:1 --model m --prompts /nowhere --concurrency 1 --requests 1
load --url $GATEWAY --model m --prompts @bad.jsonl --concurrency 1 --requests 1
load --url $GATEWAY --model m --prompts @empty.jsonl --concurrency 1 --requests 1
load --url http://127.0.0.1:1 --model m --prompts @prompts.jsonl --concurrency 0 --requests 1
load --url http://127.0.0.1:1 --model m --prompts @prompts.jsonl --rate 0 --requests 1
load --url http://127.0.0.1:1 --model m --prompts @prompts.jsonl --rate nan --requests 1
load --url http://127.0.0.1:1 --model m --prompts @prompts.jsonl --concurrency 1 --requests 0
load --url http://127.0.0.1:1 --model m --prompts @prompts.jsonl --concurrency 1 --duration 0s
load --url http://127.0.0.1:1 --model m --prompts @prompts.jsonl --concurrency 1 --requests 1 --body nonsense
load --url http://127.0.0.1:1 --model m --prompts @prompts.jsonl --concurrency 1 --requests 1 --header nonsense
load --url http://127.0.0.1:1 --model m --prompts @prompts.jsonl --concurrency 1 --requests 1 --api-key-env NOT_SET_HERE
load --url http://127.0.0.1:1 --model m --prompts @prompts.jsonl --concurrency 1 --requests 1 --max-errors 7
load --url https://127.0.0.1:1 --model m --prompts @prompts.jsonl --concurrency 1 --requests 1 --ca /nowhere
load --url http://127.0.0.1:1 --model m --prompts @prompts.jsonl --concurrency 1 --requests 1 --threads 0
load --url http://127.0.0.1:1 --model m --prompts @prompts.jsonl --concurrency 1 --requests 1 --compare nowhere
load --url http://127.0.0.1:1 --model m --prompts @prompts.jsonl --arrivals /nowhere
load --url http://127.0.0.1:1 --model m --prompts @prompts.jsonl --arrivals @prompts.jsonl
completions nonsense
";

/// Command lines that fail for reasons outside the user's input: exit code 1. Placeholders as in `WRONG`.
const FAILED: &str = "
--log off serve --config @taken.toml
serve --engine sglang --url http://127.0.0.1:1
load --url http://127.0.0.1:1 --prompts @prompts.jsonl --concurrency 1 --requests 1
load --url http://127.0.0.1:1 --model m --prompts @prompts.jsonl --concurrency 1 --requests 1
profile build $TRACE --out /nowhere/o
solve --profile @p.profile --groups 4 --out /nowhere/o
tables export --tables @m.tables --format sglang --out /nowhere/o
man @prompts.jsonl
";

#[test]
fn exit_codes_are_those_of_the_page() {
    let desk = Desk::new();
    wrong_files(&desk);
    let mut wrong = Vec::new();
    for (lines, code) in [(WRONG, 2), (FAILED, 1)] {
        for line in lines.lines().filter(|line| !line.is_empty()) {
            let line =
                if line.starts_with("up ") { format!("{line} --data @data") } else { line.replace(" O", " --out @o") };
            let words = desk.words(&line);
            let output = run(&words.iter().map(String::as_str).collect::<Vec<_>>());
            let said = String::from_utf8_lossy(&output.stderr);
            if output.status.code() != Some(code) || said.contains("panicked") || said.trim().is_empty() {
                wrong.push(format!("{line}: expected {code}: {}", describe(&output)));
            }
            assert!(!desk.path("o").exists(), "{line} wrote something");
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
