//! The bar of one unit.

use std::ops::Range;

use hsdp_sharding::{Region, UnitLayout};

use crate::escape;

/// Minimum width of padding, in pixels. A few elements among millions would not be visible.
pub(super) const LEAST: f64 = 2.0;

/// Maximum number of listed parameters of a shard. Further ones are counted.
const LISTED: usize = 12;

/// Colors of neighboring shards, which make them distinguishable.
const COLORS: [&str; 4] = ["#4e79a7", "#f28e2b", "#59a14f", "#b07aa1"];

/// The position of a bar, in pixels.
pub(super) struct Bar {
    pub(super) x: usize,
    pub(super) y: usize,
    pub(super) width: usize,
    pub(super) height: usize,
}

impl Bar {
    /// Draws each shard as its rank stores it: its slice of the trainable region, then its slice of
    /// the frozen region, with padding drawn over them.
    pub(super) fn draw(&self, layout: &UnitLayout, owners: &dyn Fn(usize) -> String) -> String {
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
                svg += &self.part(&drawn, &slice, (&look, &said(&drawn, &owners(shard))));
                for gap in gaps.iter().filter_map(|gap| common(gap, &slice)) {
                    let said = format!("padding: {} elements from {}", gap.len(), gap.start);
                    svg += &self.part(&drawn, &gap, ("fill=\"url(#padding)\"", &said));
                }
            }
        }
        svg
    }

    /// Draws a range of a slice. A range at the end of the slice is widened to the left.
    fn part(&self, drawn: &Drawn<'_>, range: &Range<usize>, (look, said): (&str, &str)) -> String {
        let scale = self.width as f64 / drawn.layout.full_len() as f64;
        let [left, slice] = [drawn.start(), drawn.slice.len()].map(|it| it as f64 * scale);
        let width = (range.len() as f64 * scale).max(LEAST.min(slice));
        let start = ((range.start - drawn.slice.start) as f64 * scale).min(slice - width);
        let (x, y, height) = (self.x as f64 + left + start, self.y, self.height);
        let said = escape::text(said);
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
