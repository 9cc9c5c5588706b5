//! Draws a rank's step over time, lane by lane.

use std::collections::BTreeMap;

use hsdp_comm::Stage;
use hsdp_simulator::{Lane, Span, Time, What, Work};

use super::svg::{bar, drawing, text};

const WIDTH: f64 = 1100.0;
const LEFT: f64 = 110.0;
const ROW: f64 = 34.0;
const TOP: f64 = 8.0;

/// Draws the lanes of the first color. Spans that are narrower than a tenth of a unit are left out
/// if another of their kind is next to them.
pub(super) fn of(spans: &[Span], step: Time) -> String {
    let mut lanes: BTreeMap<Lane, Vec<&Span>> = BTreeMap::new();
    let drawn =
        |span: &&Span| span.color == 0 && kind(span.what).is_some() && span.begins < span.ends;
    for span in spans.iter().filter(drawn) {
        lanes.entry(span.lane).or_default().push(span);
    }
    let scale = (WIDTH - LEFT) / step.seconds().max(f64::MIN_POSITIVE);
    let mut content = String::new();
    for (row, (lane, spans)) in lanes.iter().enumerate() {
        let y = TOP + ROW * row as f64;
        content += &text((LEFT - 10.0, y + 19.0), "end", name(*lane));
        for (begins, ends, what) in merged(spans, step) {
            let (class, word) = kind(what).unwrap_or(("", ""));
            let (x, width) =
                (LEFT + begins.seconds() * scale, (ends.saturating_sub(begins)).seconds() * scale);
            content += &bar(
                [x, y, width.max(0.3), ROW - 8.0],
                class,
                &format!("{word}, {begins} to {ends}"),
            );
        }
    }
    let bottom = TOP + ROW * lanes.len() as f64;
    for tick in 0..=4u32 {
        let part = f64::from(tick) / 4.0;
        let at = Time::from_seconds(step.seconds() * part).unwrap_or(Time::ZERO);
        let anchor = ["start", "middle", "middle", "middle", "end"][tick as usize];
        content += &text((LEFT + (WIDTH - LEFT) * part, bottom + 14.0), anchor, &at.to_string());
    }
    content += &legend(bottom + 40.0);
    drawing((WIDTH, bottom + 50.0), "Time line of a step", &content)
}

/// Merges neighbors of one kind if the gap between them is too small to see.
fn merged(spans: &[&Span], step: Time) -> Vec<(Time, Time, What)> {
    let gap = step.picoseconds() / 20_000;
    let mut spans = spans.to_vec();
    spans.sort_by_key(|span| (span.begins, span.ends));
    let mut merged: Vec<(Time, Time, What)> = Vec::new();
    for span in spans {
        match merged.last_mut() {
            Some((_, ends, what))
                if kind(*what) == kind(span.what)
                    && span.begins.saturating_sub(*ends).picoseconds() < gap =>
            {
                *ends = span.ends.max(*ends);
            }
            _ => merged.push((span.begins, span.ends, span.what)),
        }
    }
    merged
}

const KINDS: [(&str, &str); 8] = [
    ("forward", "forward"),
    ("backward", "backward"),
    ("optimizer", "norm and update"),
    ("sums", "sums"),
    ("gather", "gathers"),
    ("reduce", "reduce-scatters"),
    ("all-reduce", "all-reduces"),
    ("exchange", "exchanges"),
];

/// Returns the class and the words of a use. `None` for uses that are not drawn.
fn kind(what: What) -> Option<(&'static str, &'static str)> {
    let index = match what {
        What::Work(Work::Forward(_) | Work::Loss) => 0,
        What::Work(Work::Backward(_)) => 1,
        What::Work(Work::Norm | Work::Update) => 2,
        What::Work(Work::Accumulate(_) | Work::Fold(_)) => 3,
        What::Operation(operation) => match operation.stage {
            Stage::Gather => 4,
            Stage::Reduce => 5,
            Stage::AllReduce => 6,
            _ => 7,
        },
        What::Launch(_) | What::Issue(_) | What::Wait(_) => return None,
    };
    Some(KINDS[index])
}

fn name(lane: Lane) -> &'static str {
    match lane {
        Lane::Host | Lane::Computation => "computation",
        Lane::Collectives(0) => "exchanges",
        Lane::Collectives(1) => "collectives",
        Lane::Collectives(2) => "reductions",
        Lane::Collectives(_) => "all-reduces",
    }
}

fn legend(y: f64) -> String {
    let mut legend = String::new();
    let mut x = LEFT;
    for (class, words) in KINDS {
        legend += &bar([x, y - 11.0, 12.0, 12.0], class, words);
        legend += &text((x + 17.0, y), "start", words);
        x += 38.0 + 7.0 * words.len() as f64;
    }
    legend
}
