//! How much of the time is computed over slower and farther links, and what is learnt by step, by byte and by second: of plans that also have
//! ranks which talk to nobody.

mod public;
#[cfg(test)]
mod tests;

use rig::plot::{COLOURS, Curve, Labels, Point, Scale, curves};
use rig::record::{Cell, Measured};
use rig::text::{grid, wrapped};

use super::case::ROUNDS;
use super::charts::curve;
use super::digest::{Case, Digest, SINGLE, distinct, is_in_memory};
use super::findings::is_networked;
use super::html::{Mark, Page, Table};
use super::text::{all_of, bytes, count, figure};

/// Training losses that a point of a curve is the mean of.
const SMOOTHED: usize = 10;

/// Columns of a terminal.
const WIDTH: usize = 80;

/// Round trips from which on a link is far, in milliseconds: a rate says too little of it.
const FAR: f64 = 5.0;

/// What others are compared with.
const REFERENCE: &str = "ddp";

/// Everything that is told.
pub(super) struct Bandwidth<'d, 'a> {
    cells: Vec<Networked<'d, 'a>>,
    learnt: Vec<Learnt<'d, 'a>>,
}

/// A cell whose ranks talk over a link.
struct Networked<'d, 'a> {
    case: &'d Case<'a>,
    /// Its strategy, and how it compresses.
    name: String,
    /// Time of its ranks' share of a step where they talk to nobody, by its step.
    utilisation: f64,
    /// Seconds of sending at the link's rate for each second of computing, where there is a rate.
    load: Option<f64>,
}

/// What a strategy learns, of the longest runs.
struct Learnt<'d, 'a> {
    case: &'d Case<'a>,
    name: String,
    /// By step, each the mean of the last few.
    losses: Vec<f64>,
    /// That the rank sends a step that sends most.
    bytes: Option<f64>,
}

impl<'d, 'a> Bandwidth<'d, 'a> {
    /// Nothing where no ranks have computed alone, or none over a link.
    pub(super) fn of(digest: &'d Digest<'a>) -> Option<Self> {
        let over_links = |case: &&Case<'_>| is_networked(case) && !is_in_memory(case.cell);
        let cells: Vec<Networked<'_, '_>> =
            digest.cases.iter().filter(over_links).filter_map(|case| Networked::of(digest, case)).collect();
        let longest = cells.iter().map(|cell| cell.case.cell.steps).max()?;
        let long = cells.iter().filter(|cell| cell.case.cell.steps == longest);
        let mut learnt: Vec<Learnt<'_, '_>> = Vec::new();
        for one in long.filter_map(|cell| Learnt::of(cell.case)) {
            // Losses depend on neither link nor transport.
            if learnt.iter().all(|known| known.name != one.name) {
                learnt.push(one);
            }
        }
        Some(Bandwidth { cells: shortest(cells), learnt })
    }

    /// The links, fast ones first.
    fn links(&self) -> Vec<&'d str> {
        let mut links = distinct(self.cells.iter().map(|cell| cell.case.cell.link.as_str()));
        links.reverse();
        links
    }

    fn transports(&self) -> Vec<&'d str> {
        distinct(self.cells.iter().map(|cell| cell.case.cell.transport.as_str()))
    }

    fn names(&self) -> Vec<&str> {
        distinct(self.cells.iter().map(|cell| cell.name.as_str()))
    }

    fn get(&self, name: &str, link: &str, transport: &str) -> Option<&Networked<'d, 'a>> {
        let is = |cell: &&Networked<'_, '_>| {
            cell.name == name && cell.case.cell.link == link && cell.case.cell.transport == transport
        };
        self.cells.iter().find(is)
    }

    /// `lan-1g (1 Gbit/s)`.
    fn titled(&self, link: &str) -> String {
        let case = self.cells.iter().find(|cell| cell.case.cell.link == link);
        let words = case.and_then(|cell| cell.case.traits.words());
        words.map_or_else(|| link.to_string(), |words| format!("{link} ({words})"))
    }

    /// The loss that is asked for: that of the reference after half of its steps; and after how many that is.
    fn target(&self) -> Option<(f64, usize)> {
        let reference = self.learnt.iter().find(|one| one.name == REFERENCE)?;
        let half = reference.losses.len() / 2;
        Some((*reference.losses.get(half.checked_sub(1)?)?, half))
    }

    /// Seconds until a strategy has learnt as much, over a link.
    fn seconds_to(&self, loss: f64, name: &str, link: &str, transport: &str) -> Option<f64> {
        let learnt = self.learnt.iter().find(|one| one.name == name)?;
        let cell = self.get(name, link, transport)?;
        Some(learnt.steps_to(loss)? as f64 * cell.case.step?.estimate / 1e3)
    }
}

impl<'d, 'a> Networked<'d, 'a> {
    fn of(digest: &'d Digest<'a>, case: &'d Case<'a>) -> Option<Self> {
        let alone = alone(digest, case)?.step?.estimate;
        let step = case.step?.estimate;
        let rate = case.traits.rate.map(|rate| 1e6 * rate);
        let sent = sent(case);
        let load = rate.zip(sent).map(|(rate, sent)| 8.0 * sent / rate / (alone / 1e3));
        (step > 0.0).then(|| Networked { case, name: name(case.cell), utilisation: alone / step, load })
    }

    /// `87 %`, with a star where ranks share cores.
    fn share(&self) -> String {
        format!("{:.0} %{}", 100.0 * self.utilisation, if self.case.crowd.is_some() { "*" } else { "" })
    }

    fn is_near(&self) -> bool {
        !self.case.traits.lossy && self.case.traits.rtt.is_none_or(|ms| ms < FAR)
    }
}

impl<'d, 'a> Learnt<'d, 'a> {
    fn of(case: &'d Case<'a>) -> Option<Self> {
        let measured: &Measured = case.good.first()?.measured;
        let known: Vec<f64> = measured.losses.iter().copied().map_while(|loss| loss).collect();
        let mean = |end: usize| {
            let last = &known[(end + 1).saturating_sub(SMOOTHED)..=end];
            last.iter().sum::<f64>() / last.len() as f64
        };
        let losses: Vec<f64> = (0..known.len()).map(mean).collect();
        (!losses.is_empty()).then(|| Learnt { case, name: name(case.cell), losses, bytes: sent(case) })
    }

    /// Steps until the loss is as low; none if it never is.
    fn steps_to(&self, loss: f64) -> Option<usize> {
        Some(self.losses.iter().position(|reached| *reached <= loss)? + 1)
    }

    /// Losses by what a step adds to x.
    fn curve(&self, a_step: f64) -> Curve {
        let point = |(index, loss): (usize, &f64)| Point { x: (index + 1) as f64 * a_step, y: *loss, interval: None };
        named(self.case, self.losses.iter().enumerate().map(point).collect())
    }
}

/// Of cells that differ in the number of steps alone, those with fewest: their times are the same.
fn shortest<'d, 'a>(cells: Vec<Networked<'d, 'a>>) -> Vec<Networked<'d, 'a>> {
    let cells_of: Vec<_> = cells.iter().map(|cell| cell.case.cell.clone()).collect();
    let is_shortest = |cell: &Networked<'_, '_>| {
        let mut like = cell.case.cell.clone();
        cells_of.iter().all(|other| {
            like.steps = other.steps;
            *other != like || other.steps >= cell.case.cell.steps
        })
    };
    cells.into_iter().filter(is_shortest).collect()
}

/// The ranks that talk to nobody and do what those of `case` compute: as many sequences each, and as many ranks, where there are such.
fn alone<'d, 'a>(digest: &'d Digest<'a>, case: &Case<'_>) -> Option<&'d Case<'a>> {
    let wanted = case.cell;
    let same = |alone: &&Case<'_>| {
        let cell = alone.cell;
        let numerics = (&cell.preset, &cell.model, &cell.precision, &cell.kernels, cell.threads, cell.recompute);
        let theirs =
            (&wanted.preset, &wanted.model, &wanted.precision, &wanted.kernels, wanted.threads, wanted.recompute);
        cell.strategy == SINGLE
            && cell.alone
            && alone.step.is_some()
            && numerics == theirs
            && cell.accumulation == wanted.accumulation
            && cell.batch * wanted.workers() == wanted.batch * cell.ranks
    };
    let near = |alone: &&Case<'_>| alone.cell.ranks.abs_diff(wanted.workers());
    digest.cases.iter().filter(same).min_by_key(near)
}

/// Its strategy, and how it compresses.
pub(super) fn name(cell: &Cell) -> String {
    let compress = cell.compress.as_ref();
    compress.map_or_else(|| cell.strategy.clone(), |compress| format!("{} {compress}", cell.strategy))
}

/// Payload bytes a step of the rank that sends most.
pub(super) fn sent(case: &Case<'_>) -> Option<f64> {
    case.by_rank(|rank| rank.payload_bytes.map(|bytes| bytes as f64), |ranks| ranks.into_iter().max_by(f64::total_cmp))
}

/// A line of the strategy's colour; one that compresses has another, and is dashed.
fn named(case: &Case<'_>, points: Vec<Point>) -> Curve {
    let line = curve(&case.cell.strategy, points);
    match &case.cell.compress {
        None => line,
        Some(compress) => {
            let (colour, mark) = look(&case.cell.strategy, compress);
            Curve { name: name(case.cell), colour, dashed: true, mark: Some(mark), ..line }
        }
    }
}

/// The colour and the mark of a strategy that compresses.
fn look(strategy: &str, compress: &str) -> (usize, usize) {
    let place = |names: &[&str], own: &str| names.iter().position(|name| *name == own).unwrap_or(names.len());
    let kind = compress.split(':').next().unwrap_or(compress);
    let number = place(&COMPRESSIONS, kind) + COMPRESSIONS.len() * place(&COMPRESSIBLE, strategy);
    // A strategy's mark has the number of its colour: one further, none looks like one of theirs.
    (number % COLOURS, (number + 1) % 6)
}

/// Compressions, and the strategies that have them: each pair has a look of its own.
const COMPRESSIONS: [&str; 4] = ["int8", "sign", "topk", "powersgd"];
const COMPRESSIBLE: [&str; 3] = ["ddp", "ring", "ps"];

/// The answer for a terminal, after the sentences about single cells.
pub(super) fn text(digest: &Digest<'_>) -> Option<String> {
    let bandwidth = Bandwidth::of(digest)?;
    let transport = *bandwidth.transports().first()?;
    let mut text: Vec<String> = sentences(&bandwidth).iter().map(|sentence| wrapped(sentence, WIDTH)).collect();
    let links = bandwidth.links();
    let header: Vec<String> =
        std::iter::once(String::new()).chain(links.iter().map(|link| (*link).to_string())).collect();
    let line = |name: &&str| {
        let share = |link: &&str| bandwidth.get(name, link, transport).map_or("-".into(), Networked::share);
        std::iter::once((*name).to_string()).chain(links.iter().map(share)).collect::<Vec<String>>()
    };
    let lines: Vec<Vec<String>> = bandwidth.names().iter().map(line).collect();
    text.push(format!("\nShare of the time that is computed, over {transport}:"));
    text.push(grid(&header, &lines));
    let crowds = distinct(bandwidth.cells.iter().filter_map(|cell| cell.case.crowd.clone()));
    if !crowds.is_empty() {
        text.push(format!("* {}", crowds.join("; ")));
    }
    Some(text.join("\n"))
}

/// What is found, in words.
fn sentences(bandwidth: &Bandwidth<'_, '_>) -> Vec<String> {
    let mut said: Vec<String> = bandwidth.links().iter().filter_map(|link| computed(bandwidth, link)).collect();
    said.extend(transports_apart(bandwidth));
    said.extend(soonest(bandwidth));
    said.extend(public::sentence(bandwidth));
    let rounds = bandwidth.cells.iter().map(|cell| cell.case.good.len()).min().unwrap_or(0);
    if rounds < ROUNDS {
        said.push(format!("After {} small differences may be chance.", count(rounds, "round")));
    }
    said
}

/// How much of the time the reference computes on a link, and which strategy most.
fn computed(bandwidth: &Bandwidth<'_, '_>, link: &str) -> Option<String> {
    let transport = *bandwidth.transports().first()?;
    let own = |cell: &&Networked<'_, '_>| {
        cell.case.cell.link == link && cell.case.cell.transport == transport && cell.case.crowd.is_none()
    };
    let reference = bandwidth.get(REFERENCE, link, transport)?;
    let most = bandwidth.cells.iter().filter(own).max_by(|a, b| a.utilisation.total_cmp(&b.utilisation))?;
    Some(format!(
        "On {}, {REFERENCE} over {transport} computes {} of the time; {} has the largest share, {}.",
        bandwidth.titled(link),
        reference.share(),
        most.name,
        most.share()
    ))
}

/// How much of the time the reference computes over the other transports.
fn transports_apart(bandwidth: &Bandwidth<'_, '_>) -> Option<String> {
    let transports = bandwidth.transports();
    let others = transports.get(1..).filter(|others| !others.is_empty())?;
    let told = |transport: &&str| {
        let one = |link: &&str| Some(format!("{} on {link}", bandwidth.get(REFERENCE, link, transport)?.share()));
        let shares: Vec<String> = bandwidth.links().iter().filter_map(one).collect();
        all_of(&shares).map(|shares| format!("over {transport} {shares}"))
    };
    let told: Vec<String> = others.iter().filter_map(told).collect();
    (!told.is_empty()).then(|| format!("{REFERENCE} computes {}.", told.join("; ")))
}

/// Which strategy is first at the loss, on each link.
fn soonest(bandwidth: &Bandwidth<'_, '_>) -> Option<String> {
    let (loss, steps) = bandwidth.target()?;
    let transport = *bandwidth.transports().first()?;
    let of_link = |link: &&str| {
        let seconds = |name: &str| bandwidth.seconds_to(loss, name, link, transport);
        let reference = seconds(REFERENCE)?;
        let (first, least) = bandwidth
            .names()
            .into_iter()
            .filter_map(|name| Some((name, seconds(name)?)))
            .min_by(|a, b| a.1.total_cmp(&b.1))?;
        Some(match first {
            REFERENCE => format!("on {link} {REFERENCE} itself, after {} s", figure(reference)),
            _ => format!("on {link} {first}, after {} s ({REFERENCE} {} s)", figure(least), figure(reference)),
        })
    };
    let told: Vec<String> = bandwidth.links().iter().filter_map(of_link).collect();
    (!told.is_empty()).then(|| {
        format!(
            "A loss of {loss:.2} takes {REFERENCE} {steps} steps. The first to reach it over {transport} is {}.",
            told.join("; ")
        )
    })
}

pub(super) fn write(page: &mut Page, digest: &Digest<'_>) {
    let Some(bandwidth) = Bandwidth::of(digest) else { return };
    page.section("bandwidth", "Bandwidth", "How much of the time is spent computing, and what is learnt?");
    let mark = if bandwidth.cells.iter().all(|cell| cell.case.good.len() >= ROUNDS) { Mark::Found } else { Mark::Open };
    let said: Vec<(Mark, String)> = sentences(&bandwidth).into_iter().map(|text| (mark, text)).collect();
    page.statements(&said);
    page.small(
        "Share of the time that is computed (compute utilisation): the step time of the same number of ranks that do their share of the work and do \
         not communicate, divided by the step time of the cell. Processor time that communication takes lowers this share, too. It can be above \
         100 % where a strategy divides the work of the optimizer among the ranks.",
    );
    for transport in bandwidth.transports() {
        shares(page, &bandwidth, transport);
    }
    if !bandwidth.learnt.is_empty() {
        learning(page, &bandwidth);
    }
    public::write(page, &bandwidth);
}

/// Table and curve of a transport.
fn shares(page: &mut Page, bandwidth: &Bandwidth<'_, '_>, transport: &str) {
    let links = bandwidth.links();
    let titles: Vec<String> = links.iter().map(|link| bandwidth.titled(link)).collect();
    let head: Vec<&str> = std::iter::once("strategy").chain(titles.iter().map(String::as_str)).collect();
    let mut table = Table::new(&head, 1);
    for name in bandwidth.names() {
        let share = |link: &&str| bandwidth.get(name, link, transport).map_or("–".into(), Networked::share);
        table.row(std::iter::once(name.to_string()).chain(links.iter().map(share)).collect());
    }
    let title = format!("Share of the time that is computed, over {transport}");
    page.heading(&title);
    let line = |name: &str| {
        let here =
            |cell: &&Networked<'_, '_>| cell.name == name && cell.case.cell.transport == transport && cell.is_near();
        let cells: Vec<&Networked<'_, '_>> = bandwidth.cells.iter().filter(here).collect();
        let point = |cell: &&Networked<'_, '_>| {
            Some(Point { x: cell.case.traits.rate?, y: 100.0 * cell.utilisation, interval: None })
        };
        let mut points: Vec<Point> = cells.iter().filter_map(point).collect();
        points.sort_by(|a, b| a.x.total_cmp(&b.x));
        cells.first().map(|cell| named(cell.case, points))
    };
    let lines: Vec<Curve> = bandwidth.names().into_iter().filter_map(line).collect();
    let labels = Labels { title: &title, x: "rate (Mbit/s)", y: "share of the time (%)" };
    let scale = Scale { log_x: true, from_zero: true, ..Scale::default() };
    page.figure(&title, curves(&labels, &lines, scale), "Links that are near; the far ones are in the table.");
    page.table(&table);
    if bandwidth.cells.iter().any(|cell| cell.case.crowd.is_some()) {
        page.small("*: ranks share cores; so do the ranks that do not communicate.");
    }
}

/// Losses against steps, bytes and seconds.
fn learning(page: &mut Page, bandwidth: &Bandwidth<'_, '_>) {
    let longest = bandwidth.learnt.iter().map(|one| one.losses.len()).max().unwrap_or(0);
    page.topic("learning", "What is learnt per step, per byte and per second");
    page.small(&format!(
        "Training loss of the runs of {longest} steps, each point the mean of {SMOOTHED} steps. Losses do not depend on link and transport, except \
         for async-ps, where the order in which gradients arrive depends on the link. So the losses were measured on one link, and the seconds \
         on a link are the number of steps times the step time there. Where each rank trains by itself, the loss is that of rank 0's part of the batch.",
    ));
    let picture =
        |page: &mut Page, title: &str, x: &str, a_step: &dyn Fn(&Learnt<'_, '_>) -> Option<f64>, log_x: bool| {
            let lines: Vec<Curve> = bandwidth
                .learnt
                .iter()
                .filter_map(|one| Some(one.curve(a_step(one).filter(|step| *step > 0.0)?)))
                .collect();
            let labels = Labels { title, x, y: "loss (nats a token)" };
            page.figure(title, curves(&labels, &lines, Scale { log_x, ..Scale::default() }), "");
        };
    picture(page, "Loss against steps", "steps", &|_| Some(1.0), false);
    let megabytes = |one: &Learnt<'_, '_>| one.bytes.map(|bytes| bytes / 1e6);
    picture(page, "Loss against bytes", "MB sent, by the rank that sends most", &megabytes, true);
    for transport in bandwidth.transports() {
        for link in bandwidth.links() {
            let seconds =
                |one: &Learnt<'_, '_>| Some(bandwidth.get(&one.name, link, transport)?.case.step?.estimate / 1e3);
            let title = format!("Loss against seconds, over {transport} on {link}");
            page.folded(&title, |page| picture(page, &title, "seconds", &seconds, true));
        }
    }
    reached(page, bandwidth);
}

/// What it takes to learn as much.
fn reached(page: &mut Page, bandwidth: &Bandwidth<'_, '_>) {
    let Some((loss, _)) = bandwidth.target() else { return };
    let links = bandwidth.links();
    for transport in bandwidth.transports() {
        let mut head = vec!["strategy", "last loss", "steps", "sent"];
        head.extend(links.iter());
        let mut table = Table::new(&head, 1);
        for one in &bandwidth.learnt {
            let steps = one.steps_to(loss);
            let sent = steps.zip(one.bytes).map(|(steps, a_step)| bytes(steps as f64 * a_step));
            let seconds =
                |link: &&str| bandwidth.seconds_to(loss, &one.name, link, transport).map_or("–".into(), figure);
            let mut row = vec![
                one.name.clone(),
                one.losses.last().map_or("–".into(), |loss| format!("{loss:.3}")),
                steps.map_or("not reached".into(), |steps| steps.to_string()),
                sent.unwrap_or("–".into()),
            ];
            row.extend(links.iter().map(seconds));
            table.row(row);
        }
        page.heading(&format!("To a loss of {loss:.2}: steps, bytes, and seconds over {transport}"));
        page.table(&table);
    }
}
