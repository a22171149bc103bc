//! Whether ranks sent what their strategy's formula says.

use gpt2::trainer::RankReport;

/// What a rank did otherwise than the formula says.
pub fn off_the_formula(rank: &RankReport) -> Option<String> {
    let RankReport { expected, .. } = rank;
    let pairs = [
        ("bytes", rank.bytes_counted, expected.payload),
        ("messages", rank.messages, expected.messages),
        ("operations", Some(rank.operations), expected.operations),
    ];
    if let Some((bytes, messages)) = rank.node_sent
        && (bytes, messages) != (expected.node_payload, expected.node_messages)
    {
        return Some(format!(
            "off the formula: rank {}: {bytes} bytes in {messages} messages inside its node a step, not {} in {}",
            rank.rank, expected.node_payload, expected.node_messages
        ));
    }
    let wrong = pairs.into_iter().find_map(|(what, counted, expected)| {
        let counted = counted.filter(|counted| *counted != expected)?;
        Some(format!("off the formula: rank {}: {counted} {what} a step, not {expected}", rank.rank))
    });
    let unsteady =
        || format!("off the formula: rank {} did not send the same number of bytes in every step", rank.rank);
    wrong.or_else(|| (!rank.bytes_steady).then(unsteady))
}
