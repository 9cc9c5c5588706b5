//! Draws the memory of a rank, by category.

use hsdp_sharding::ByteCount;
use hsdp_simulator::StepMemory;

use super::svg::{bar, drawing, text};

const WIDTH: f64 = 1100.0;
const LEFT: f64 = 150.0;
const RIGHT: f64 = 130.0;
const ROW: f64 = 26.0;

/// Draws a bar for each category, and one for all, with a line at the memory that a rank may use.
pub(super) fn of(memory: &StepMemory, limit: ByteCount) -> String {
    let parts = memory.parts().into_iter().filter(|(_, bytes)| bytes.get() > 0);
    let rows: Vec<(&str, ByteCount)> = parts.chain([("all", memory.total())]).collect();
    let most = limit.get().max(memory.total().get()).max(1) as f64;
    let scale = (WIDTH - LEFT - RIGHT) / most;
    let mut content = String::new();
    for (row, (name, bytes)) in rows.iter().enumerate() {
        let (y, width) = (ROW * row as f64, bytes.get() as f64 * scale);
        let class = if *name == "all" { "all" } else { "part" };
        content += &text((LEFT - 10.0, y + 16.0), "end", name);
        content += &bar([LEFT, y + 3.0, width, ROW - 8.0], class, &format!("{name}: {bytes}"));
        content += &text((LEFT + width + 8.0, y + 16.0), "start", &bytes.to_string());
    }
    let (x, bottom) = (LEFT + limit.get() as f64 * scale, ROW * rows.len() as f64);
    content += &format!(
        "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"0\" y2=\"{bottom:.1}\" class=\"limit\"/>\n"
    );
    content += &text((x, bottom + 14.0), "middle", &limit.to_string());
    drawing((WIDTH, bottom + 20.0), "Memory of a rank by category", &content)
}
