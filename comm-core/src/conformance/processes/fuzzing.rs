//! The lines between the suite's driver and its ranks, for fuzzing.

use std::io::BufReader;
use std::sync::mpsc::channel;

use super::{Command, MARK, MemberSetup, Reply, read_replies, reply_in};
use crate::conformance::CaseOutcome;
use crate::fuzzing::target::{Target, Verdict};

pub(crate) fn targets() -> Vec<Target> {
    vec![
        Target::new("conformance answers", conformance_answers, answer_seeds).memory(64 << 10, 32),
        Target::new("conformance commands", conformance_commands, command_seeds),
    ]
}

/// What a rank prints.
pub fn conformance_answers(bytes: &[u8]) -> Verdict {
    // Whatever is no answer would be printed.
    if bytes.split_inclusive(|byte| *byte == b'\n').any(|line| !matches!(reply_in(line), Some(Ok(_)))) {
        return Verdict::Rejected;
    }
    let (sender, replies) = channel();
    // Small, so that lines come in pieces.
    read_replies(BufReader::with_capacity(7, bytes), 0, &sender);
    drop(sender);
    let lines = bytes.split_inclusive(|byte| *byte == b'\n').count();
    let replies: Vec<Reply> = replies.into_iter().collect();
    assert_eq!(replies.len(), lines, "one answer a line");
    for reply in &replies {
        let text = serde_json::to_string(reply).expect("an answer can be written");
        let again: Reply = serde_json::from_str(&text).expect("and read");
        assert_eq!(format!("{again:?}"), format!("{reply:?}"));
    }
    (lines > 0).into()
}

/// What a rank reads.
pub fn conformance_commands(bytes: &[u8]) -> Verdict {
    let Ok(command) = serde_json::from_slice::<Command<MemberSetup>>(bytes) else { return Verdict::Rejected };
    let text = serde_json::to_string(&command).expect("a command can be written");
    let again: Command<MemberSetup> = serde_json::from_str(&text).expect("and read");
    assert_eq!(serde_json::to_string(&again).expect("and written"), text);
    Verdict::Accepted
}

fn answer_seeds() -> Vec<Vec<u8>> {
    let line = |reply: &Reply| format!("{MARK}{}\n", serde_json::to_string(reply).expect("an answer can be written"));
    let all = [
        Reply::Done(Ok(())),
        Reply::Done(Err("hung".into())),
        Reply::Ran(CaseOutcome::Passed, "rank 1 aborted the job".into()),
        Reply::Ran(CaseOutcome::Skipped("no".into()), String::new()),
        Reply::Ran(CaseOutcome::Failed("rank 1: 3 elements \"wrong\"".into()), String::new()),
    ];
    let mut seeds: Vec<Vec<u8>> = all.iter().map(|reply| line(reply).into_bytes()).collect();
    seeds.push(all.iter().map(line).collect::<String>().into_bytes());
    seeds
}

fn command_seeds() -> Vec<Vec<u8>> {
    let setup =
        MemberSetup { rank: 1, world_size: 2, address_file: "/tmp/group-1".into(), secret: "0123456789abcdef".into() };
    [Command::Connect(setup), Command::Run(17), Command::Finish, Command::Drop]
        .iter()
        .map(|command| serde_json::to_vec(command).expect("a command can be written"))
        .collect()
}
