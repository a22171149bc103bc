//! Loss against time: the same losses, different clocks.

use rig::plot::{Labels, Point, Scale, curves};
use rig::record::{Axis, Measured};

use super::charts::{curve, each_group, titled};
use super::digest::{Case, Digest, Grouped, distinct, is_timing_only};
use super::html::{Page, Table};
use super::text::figure;

/// What may differ between cells that compute the same.
const NUMERICS: [Axis; 26] = [
    Axis::Precision,
    Axis::Wire,
    Axis::Compress,
    Axis::Seed,
    Axis::Preset,
    Axis::Layers,
    Axis::Heads,
    Axis::Width,
    Axis::Block,
    Axis::Batch,
    Axis::Accumulation,
    Axis::Kernels,
    Axis::Steps,
    Axis::Ranks,
    Axis::RanksPerNode,
    Axis::Strategy,
    Axis::SyncEvery,
    Axis::Staleness,
    Axis::DedicatedServer,
    Axis::Alone,
    Axis::Schedule,
    Axis::Clip,
    Axis::Optimizer,
    Axis::ShortSequences,
    Axis::LossScaling,
    Axis::Program,
];

pub(super) fn write(page: &mut Page, digest: &Digest<'_>) {
    if digest.cases.iter().all(|case| losses(case).is_none()) {
        return;
    }
    page.topic("loss", "Loss against time");
    page.small("All steps of the first round of each cell. Cells that do equal work have equal losses, but reach them at different times.");
    agreement(page, digest);
    let known = |cases: &[&Case<'_>]| cases.iter().any(|case| losses(case).is_some());
    each_group(page, digest.groups_and_single(&[Axis::Strategy]), known, |page, label, cases| {
        let lines: Vec<_> =
            cases.iter().filter_map(|case| Some(curve(&case.cell.strategy, points(losses(case)?)))).collect();
        let title = titled("Loss against time", label);
        let labels = Labels { title: &title, x: "seconds from the first step", y: "loss (nats a token)" };
        page.figure(&title, curves(&labels, &lines, Scale::default()), "A mark for each step, where it ended.");
    });
}

/// What the cell's first run says of losses. Over `null` each rank goes its own way, and its losses mean nothing.
fn losses<'a>(case: &Case<'a>) -> Option<&'a Measured> {
    if is_timing_only(case.cell) {
        return None;
    }
    let measured = case.good.first()?.measured;
    measured.losses.iter().any(Option::is_some).then_some(measured)
}

fn points(measured: &Measured) -> Vec<Point> {
    let both = measured.seconds.iter().zip(&measured.losses);
    both.filter_map(|(x, loss)| Some(Point { x: *x, y: (*loss)?, interval: None })).collect()
}

/// Cells that should compute the same, over whatever transport and link, with what they say of losses and weights.
fn alike<'d, 'a>(digest: &'d Digest<'a>) -> Vec<(String, Vec<(&'d Case<'a>, &'a Measured)>)> {
    let others: Vec<Axis> = Axis::ALL.into_iter().filter(|axis| !NUMERICS.contains(axis)).collect();
    let both = |case: &'d Case<'a>| Some((case, losses(case)?));
    let groups = digest.groups(&others).into_iter();
    groups.map(|Grouped { label, cases, .. }| (label, cases.into_iter().filter_map(both).collect())).collect()
}

fn different_weights(cells: &[(&Case<'_>, &Measured)]) -> usize {
    distinct(cells.iter().map(|(_, measured)| measured.weights_hash.as_str())).len()
}

/// Whether two runs of these cells give the same weights.
fn is_repeatable(cells: &[(&Case<'_>, &Measured)]) -> bool {
    cells.iter().all(|(case, _)| case.cell.is_repeatable())
}

/// How many groups of cells should have equal weights, and in how many of these they are equal to the last bit.
pub(super) fn equal_weights(digest: &Digest<'_>) -> (usize, usize) {
    let groups: Vec<_> = alike(digest).into_iter().map(|(_, cells)| cells).collect();
    let several = || groups.iter().filter(|cells| cells.len() > 1 && is_repeatable(cells));
    (several().count(), several().filter(|cells| different_weights(cells) == 1).count())
}

/// Whether cells that should compute the same do: by the last loss, and by the hash of the weights over transports.
fn agreement(page: &mut Page, digest: &Digest<'_>) {
    let mut table = Table::new(&["cells", "how many", "lowest last loss", "highest last loss", "weights"], 1);
    for (label, cells) in alike(digest) {
        let last: Vec<f64> =
            cells.iter().filter_map(|(_, measured)| measured.losses.last().copied().flatten()).collect();
        let (least, most) =
            last.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), loss| (low.min(*loss), high.max(*loss)));
        if last.is_empty() {
            continue;
        }
        let weights = match different_weights(&cells) {
            _ if cells.len() == 1 => "–".into(),
            _ if !is_repeatable(&cells) => "depend on timing".into(),
            0 | 1 => "identical".into(),
            several => format!("{several} different"),
        };
        let name = if label.is_empty() { "all".into() } else { label };
        table.row(vec![name, cells.len().to_string(), precise(least), precise(most), weights]);
    }
    if !table.rows.is_empty() {
        page.folded_table("Losses and weights over transports and links", &table);
    }
}

fn precise(loss: f64) -> String {
    if loss.is_finite() { format!("{loss:.5}") } else { figure(loss) }
}
