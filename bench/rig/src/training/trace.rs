//! Traces that ui.perfetto.dev and chrome://tracing open: one process a rank, its training thread, and below it what was under way.
//!
//! Format: <https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU>, "JSON Object Format", times in microseconds.

use gpt2::record::{Activity, Operation};
use serde_json::{Value, json};

use super::skew::Step;

/// The training thread's row; operations have rows of their own after it.
const TRAINING: usize = 0;

/// A trace of these steps of each rank.
pub(crate) fn trace(name: &str, ranks: &[Vec<Step>]) -> Value {
    let begin = ranks.iter().flatten().flat_map(|step| &step.spans).map(|span| span.began).min().unwrap_or(0);
    let microseconds = |ns: u64| ns.saturating_sub(begin) as f64 / 1e3;
    let event = |name: &str, category: &str, (rank, row): (usize, usize), (began, ended): (u64, u64)| {
        json!({
            "name": name, "cat": category, "ph": "X", "pid": rank, "tid": row,
            "ts": microseconds(began), "dur": ended.saturating_sub(began) as f64 / 1e3,
        })
    };
    let mut events = Vec::new();
    for (rank, steps) in ranks.iter().enumerate() {
        events.push(json!({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": format!("rank {rank}")}}));
        events.push(thread_name(rank, TRAINING, "training".into()));
        let mut rows = 0;
        for step in steps {
            for span in &step.spans {
                let waited_for = span.operation.and_then(|index| step.operations.get(index));
                let name = waited_for.map_or_else(
                    || activity(span.activity).to_string(),
                    |operation| format!("{} {}", activity(span.activity), operation.label),
                );
                let times = (span.began, span.ended);
                events.push(event(&name, activity(span.activity), (rank, TRAINING), times));
            }
            let placed = place(&step.operations);
            for (operation, row) in step.operations.iter().zip(&placed) {
                rows = rows.max(row + 1);
                let times = (operation.began, operation.ended);
                events.push(event(&operation.label, "operation", (rank, TRAINING + 1 + row), times));
            }
        }
        events.extend((0..rows).map(|row| thread_name(rank, TRAINING + 1 + row, format!("under way {row}"))));
    }
    json!({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"cell": name}})
}

fn thread_name(rank: usize, row: usize, name: String) -> Value {
    json!({"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": name}})
}

fn activity(activity: Activity) -> &'static str {
    match activity {
        Activity::Data => "data",
        Activity::Forward => "forward",
        Activity::Backward => "backward",
        Activity::Device => "wait for the device",
        Activity::Pack => "pack",
        Activity::Exposed => "wait",
        Activity::Scalars => "scalars",
        Activity::Unpack => "unpack",
        Activity::Optimizer => "optimizer",
    }
}

/// A row for each operation, so that those of one row follow one another.
fn place(operations: &[Operation]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..operations.len()).collect();
    order.sort_by_key(|index| operations[*index].began);
    let mut ends: Vec<u64> = Vec::new();
    let mut rows = vec![0; operations.len()];
    for index in order {
        let Operation { began, ended, .. } = operations[index];
        let row = ends.iter().position(|end| *end <= began).unwrap_or(ends.len());
        if row == ends.len() {
            ends.push(ended);
        }
        ends[row] = ended;
        rows[index] = row;
    }
    rows
}

#[cfg(test)]
mod tests {
    use gpt2::record::Span;

    use super::super::skew::made_up;
    use super::*;

    fn operation(label: &str, began: u64, ended: u64) -> Operation {
        made_up::operation(label, None, [began, began, ended])
    }

    #[test]
    fn operations_that_overlap_lie_below_one_another() {
        let operations = [operation("a", 0, 10), operation("b", 5, 20), operation("c", 10, 12), operation("d", 11, 15)];
        assert_eq!(place(&operations), [0, 1, 0, 2]);
    }

    #[test]
    fn every_rank_is_a_process_with_its_spans_and_operations() {
        let span = Span { activity: Activity::Exposed, operation: Some(0), began: 1_000, ended: 3_000 };
        let step = Step {
            ms: 1.0,
            spans: vec![span],
            operations: vec![operation("gradients", 1_500, 2_500)],
            communication: 0.0,
            hidden: 0.0,
        };
        let trace = trace("ddp tcp", &[vec![step.clone()], vec![step]]);
        let events = trace["traceEvents"].as_array().unwrap();
        let slices: Vec<&Value> = events.iter().filter(|event| event["ph"] == "X").collect();
        assert_eq!(slices.len(), 4);
        assert_eq!(
            (&slices[0]["name"], &slices[0]["ts"], &slices[0]["dur"]),
            (&json!("wait gradients"), &json!(0.0), &json!(2.0))
        );
        assert_eq!((&slices[1]["ts"], &slices[1]["tid"]), (&json!(0.5), &json!(1)));
        assert_eq!(events.iter().filter(|event| event["name"] == "process_name").count(), 2);
    }
}
