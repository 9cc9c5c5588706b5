//! Draws the shards of each unit as SVG: a bar for each unit, divided among the shards, with
//! hatched padding.

use std::fmt::Write as _;
use std::ops::Range;

use hsdp_sharding::{Axis, Coordinate, Plan, Region, UnitId, UnitLayout};

use super::report::grouped;
use crate::svg::{escaped, shortened};

/// Maximum number of shards and units. More shards would be thinner than the lines between them,
/// and more units too long to show.
const MAX_SHARDS: usize = 256;
const MAX_UNITS: usize = 1000;

const NAME_WIDTH: usize = 220;
const BAR_WIDTH: usize = 960;
const NOTE_WIDTH: usize = 300;
const TOP: usize = 96;
const ROW: usize = 26;
const MARGIN: usize = 16;

/// Draws a plan.
///
/// # Errors
/// A text, if there are more shards or units than can be drawn.
pub(super) fn of(name: &str, plan: &Plan) -> Result<String, String> {
    let shards = plan.mesh().shard_size();
    let units = plan.spec().units().len();
    if shards > MAX_SHARDS || units > MAX_UNITS {
        return Err(format!(
            "--svg draws at most {MAX_SHARDS} shards and {MAX_UNITS} units; the plan has {shards} and {units}"
        ));
    }
    let width = MARGIN + NAME_WIDTH + BAR_WIDTH + NOTE_WIDTH;
    let height = TOP + ROW * units + MARGIN;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n{HATCH}<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    svg += &heading(name, plan);
    svg += &axis(plan);
    for (row, unit) in plan.spec().unit_ids().enumerate() {
        svg += &line(plan, unit, TOP + ROW * row);
    }
    svg.push_str("</svg>\n");
    Ok(svg)
}

const HATCH: &str = "<defs><pattern id=\"padding\" width=\"4\" height=\"4\" patternUnits=\"userSpaceOnUse\" \
     patternTransform=\"rotate(45)\"><rect width=\"4\" height=\"4\" fill=\"white\"/><rect width=\"2\" height=\"4\" \
     fill=\"#444\"/></pattern></defs>\n";

fn heading(name: &str, plan: &Plan) -> String {
    let mesh = plan.mesh();
    let parameters = grouped(plan.spec().numel().get());
    let name = escaped(name);
    format!(
        "<text x=\"{MARGIN}\" y=\"26\" font-size=\"16\" font-weight=\"bold\">{name} on mesh {mesh}</text>\n\
         <text x=\"{MARGIN}\" y=\"46\">{parameters} parameters. Each bar is a unit, and all have one width. Each column is a shard, \
         held by the ranks above it. Frozen elements are pale.</text>\n\
         <rect x=\"{MARGIN}\" y=\"54\" width=\"24\" height=\"12\" fill=\"url(#padding)\" stroke=\"#444\"/>\n\
         <text x=\"{}\" y=\"64\">padding, drawn {} pixels wide or more</text>\n",
        MARGIN + 30,
        LEAST,
    )
}

/// Draws the ranks of each shard, as far as there is space for their numbers.
fn axis(plan: &Plan) -> String {
    let shards = plan.mesh().shard_size();
    let labels: Vec<String> = (0..shards).map(|shard| ranks(plan, shard)).collect();
    let longest = labels.iter().map(String::len).max().unwrap_or(0);
    let each = shards.div_ceil((BAR_WIDTH / (7 * longest + 8)).max(1));
    let mut text = String::new();
    for (shard, label) in labels.iter().enumerate().step_by(each.max(1)) {
        let x = MARGIN + NAME_WIDTH + BAR_WIDTH * (2 * shard + 1) / (2 * shards);
        let y = TOP - 8;
        let _ = writeln!(
            text,
            "<text x=\"{x}\" y=\"{y}\" text-anchor=\"middle\" fill=\"#444\">{label}</text>"
        );
    }
    let x = MARGIN;
    let y = TOP - 8;
    let _ = writeln!(text, "<text x=\"{x}\" y=\"{y}\" fill=\"#444\">ranks</text>");
    text
}

/// Lists the ranks of a shard: `1, 5` for shard 1 on mesh 2x4. With more than three replicas, lists
/// only the first and the last.
fn ranks(plan: &Plan, shard: usize) -> String {
    let mesh = plan.mesh();
    let first = mesh.rank_at(Coordinate { replicate_index: 0, shard_index: shard });
    let members = mesh.group(Axis::Replicate, first);
    match &*members {
        [first, .., last] if members.len() > 3 => format!("{first} .. {last}"),
        _ => members.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
    }
}

fn line(plan: &Plan, unit: UnitId, y: usize) -> String {
    let spec = &plan.spec()[unit];
    let layout = plan.layout(unit);
    let place = Bar { x: MARGIN + NAME_WIDTH, y, width: BAR_WIDTH, height: ROW - 6 };
    let name = escaped(&shortened(&spec.name));
    let baseline = y + ROW - 12;
    let elements = grouped(spec.numel().get());
    let padding = grouped(layout.padding().get());
    let note = MARGIN + NAME_WIDTH + BAR_WIDTH + 8;
    let owners = |shard| ranks(plan, shard);
    format!(
        "<text x=\"{MARGIN}\" y=\"{baseline}\">{name}</text>\n{}\
         <text x=\"{note}\" y=\"{baseline}\" fill=\"#444\">{elements} elements, {padding} of padding</text>\n",
        place.draw(layout, &owners),
    )
}

/// Minimum width of padding, in pixels. A few elements among millions would not be visible.
const LEAST: f64 = 2.0;

/// Maximum number of listed parameters of a shard. Further ones are counted.
const LISTED: usize = 12;

/// Colors of neighboring shards, which make them distinguishable.
const COLORS: [&str; 4] = ["#4e79a7", "#f28e2b", "#59a14f", "#b07aa1"];

/// The position of a bar, in pixels.
struct Bar {
    x: usize,
    y: usize,
    width: usize,
    height: usize,
}

impl Bar {
    /// Draws each shard as its rank stores it: its slice of the trainable region, then its slice of
    /// the frozen region, with padding drawn over them.
    fn draw(&self, layout: &UnitLayout, owners: &dyn Fn(usize) -> String) -> String {
        let gaps = gaps(layout);
        let mut svg = String::new();
        for shard in 0..layout.shard_size() {
            for (region, opacity) in [(layout.trainable(), "1"), (layout.frozen(), "0.45")] {
                let slice = slice(region, shard);
                if slice.is_empty() {
                    continue;
                }
                let drawn = Drawn { layout, shard, slice: slice.clone() };
                let color = COLORS[shard % COLORS.len()];
                let look = format!(
                    "fill=\"{color}\" fill-opacity=\"{opacity}\" stroke=\"white\" stroke-width=\"0.5\""
                );
                svg += &self.part(&drawn, &slice, &look, &said(&drawn, &owners(shard)));
                for gap in gaps.iter().filter_map(|gap| common(gap, &slice)) {
                    let said = format!("padding: {} elements from {}", gap.len(), gap.start);
                    svg += &self.part(&drawn, &gap, "fill=\"url(#padding)\"", &said);
                }
            }
        }
        svg
    }

    /// Draws a range of a slice. A range at the end of the slice is widened to the left.
    fn part(&self, drawn: &Drawn<'_>, range: &Range<usize>, look: &str, said: &str) -> String {
        let scale = self.width as f64 / drawn.layout.full_len() as f64;
        let [left, slice] = [drawn.start(), drawn.slice.len()].map(|it| it as f64 * scale);
        let width = (range.len() as f64 * scale).max(LEAST.min(slice));
        let start = ((range.start - drawn.slice.start) as f64 * scale).min(slice - width);
        let x = self.x as f64 + left + start;
        let y = self.y;
        let height = self.height;
        let said = escaped(said);
        format!(
            "<rect x=\"{x:.2}\" y=\"{y}\" width=\"{width:.2}\" height=\"{height}\" {look}><title>{said}</title></rect>\n"
        )
    }
}

/// A shard's slice of a region.
struct Drawn<'a> {
    layout: &'a UnitLayout,
    shard: usize,
    /// Range in elements of `full`.
    slice: Range<usize>,
}

impl Drawn<'_> {
    /// Returns the start of the slice in the bar, in elements.
    fn start(&self) -> usize {
        let of_shard = self.shard * self.layout.shard_len();
        let is_frozen = self.slice.start >= self.layout.frozen().start;
        of_shard + if is_frozen { self.layout.trainable().shard_len } else { 0 }
    }
}

fn slice(region: Region, shard: usize) -> Range<usize> {
    let start = region.start + shard * region.shard_len;
    start..start + region.shard_len
}

fn common(one: &Range<usize>, other: &Range<usize>) -> Option<Range<usize>> {
    let both = one.start.max(other.start)..one.end.min(other.end);
    (both.start < both.end).then_some(both)
}

/// Returns the text that a browser shows when the pointer is over a slice.
fn said(drawn: &Drawn<'_>, owners: &str) -> String {
    let Drawn { layout, shard, slice } = drawn;
    let name = |param: usize| &layout.params()[param];
    let held: Vec<String> = layout
        .pieces(*shard)
        .filter(|piece| slice.contains(&(name(piece.param).start + piece.param_start)))
        .map(|piece| {
            let Range { start, end } = piece.param_range();
            format!("{} {start}..{end}", name(piece.param).name)
        })
        .collect();
    let more = match held.len().saturating_sub(LISTED) {
        0 => String::new(),
        more => format!("\nand {more} more"),
    };
    let listed = held.iter().take(LISTED).cloned().collect::<Vec<_>>().join("\n");
    format!(
        "shard {shard}, ranks {owners}: elements {} to {}\n{listed}{more}",
        slice.start, slice.end
    )
}

/// Returns the elements of `full` that belong to no parameter.
fn gaps(layout: &UnitLayout) -> Vec<Range<usize>> {
    let mut taken: Vec<Range<usize>> = layout.params().iter().map(|slot| slot.range()).collect();
    taken.sort_unstable_by_key(|range| range.start);
    // The frozen region has its own start, so padding may precede it.
    let ends = [layout.frozen().start, layout.full_len()].map(|end| end..end);
    taken.extend(ends);
    taken.sort_by_key(|range| (range.start, range.end));
    let mut free = 0;
    let gap = |range: Range<usize>| {
        let gap = free..range.start;
        free = free.max(range.end);
        (gap.start < gap.end).then_some(gap)
    };
    taken.into_iter().filter_map(gap).collect()
}
