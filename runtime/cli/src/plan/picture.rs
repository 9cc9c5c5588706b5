//! Draws the shards of each unit as SVG: a bar for each unit, divided among the shards, with
//! hatched padding.

use std::fmt::Write as _;

use hsdp_sharding::{Axis, Coordinate, Plan, UnitId};

use self::bar::Bar;
use super::report::grouped;
use crate::escape;

mod bar;

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
    let (shards, units) = (plan.mesh().shard_size(), plan.spec().units().len());
    if shards > MAX_SHARDS || units > MAX_UNITS {
        return Err(format!(
            "--svg draws at most {MAX_SHARDS} shards and {MAX_UNITS} units; the plan has {shards} and {units}"
        ));
    }
    let (width, height) =
        (MARGIN + NAME_WIDTH + BAR_WIDTH + NOTE_WIDTH, TOP + ROW * units + MARGIN);
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
    let (mesh, parameters) = (plan.mesh(), grouped(plan.spec().numel().get()));
    let name = escape::text(name);
    format!(
        "<text x=\"{MARGIN}\" y=\"26\" font-size=\"16\" font-weight=\"bold\">{name} on mesh {mesh}</text>\n\
         <text x=\"{MARGIN}\" y=\"46\">{parameters} parameters. Each bar is a unit, and all have one width. Each column is a shard, \
         held by the ranks above it. Frozen elements are pale.</text>\n\
         <rect x=\"{MARGIN}\" y=\"54\" width=\"24\" height=\"12\" fill=\"url(#padding)\" stroke=\"#444\"/>\n\
         <text x=\"{}\" y=\"64\">padding, drawn {} pixels wide or more</text>\n",
        MARGIN + 30,
        bar::LEAST,
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
    let (x, y) = (MARGIN, TOP - 8);
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
    let (spec, layout) = (&plan.spec()[unit], plan.layout(unit));
    let place = Bar { x: MARGIN + NAME_WIDTH, y, width: BAR_WIDTH, height: ROW - 6 };
    let (name, baseline) = (escape::text(&escape::shortened(&spec.name)), y + ROW - 12);
    let (elements, padding) = (grouped(spec.numel().get()), grouped(layout.padding().get()));
    let note = MARGIN + NAME_WIDTH + BAR_WIDTH + 8;
    let owners = |shard| ranks(plan, shard);
    format!(
        "<text x=\"{MARGIN}\" y=\"{baseline}\">{name}</text>\n{}\
         <text x=\"{note}\" y=\"{baseline}\" fill=\"#444\">{elements} elements, {padding} of padding</text>\n",
        place.draw(layout, &owners),
    )
}
