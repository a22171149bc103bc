//! Whether ranks sent what their strategy's formula says.

use gpt2::trainer::RankReport;

/// What a rank did otherwise than its strategy expected of each step. The medians say by how much; what was sent late, in a later step than it was
/// expected in, shows in them and is no fault.
pub fn off_the_formula(rank: &RankReport) -> Option<String> {
    let RankReport { expected, .. } = rank;
    if let Some((bytes, messages)) = rank.node_sent
        && !rank.bytes_steady
        && (bytes, messages) != (expected.node_payload, expected.node_messages)
    {
        return Some(format!(
            "off the formula: rank {}: {bytes} bytes in {messages} messages inside its node a step, not {} in {}",
            rank.rank, expected.node_payload, expected.node_messages
        ));
    }
    let pairs = [
        ("bytes", rank.bytes_counted.filter(|_| !rank.bytes_steady), expected.payload),
        ("messages", rank.messages.filter(|_| !rank.bytes_steady), expected.messages),
        ("operations", Some(rank.operations), expected.operations),
    ];
    let wrong = pairs.into_iter().find_map(|(what, counted, expected)| {
        let counted = counted.filter(|counted| *counted != expected)?;
        Some(format!("off the formula: rank {}: {counted} {what} a step instead of {expected}", rank.rank))
    });
    let in_some_step = || {
        format!(
            "off the formula: in some step rank {} sent other bytes or messages than its strategy expected",
            rank.rank
        )
    };
    wrong.or_else(|| (!rank.bytes_steady).then(in_some_step))
}
