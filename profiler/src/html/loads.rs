//! Expert loads, layer by layer.

use super::draw::{Cells, Scale, Svg};
use crate::show::Study;

const LEFT: f64 = 56.0;
const TOP: f64 = 44.0;

pub(super) fn picture(study: &Study) -> String {
    let rows = &study.rows;
    let wide = (760.0 / rows.experts as f64).clamp(3.0, 24.0);
    let high = (420.0 / rows.layers() as f64).clamp(9.0, 20.0);
    let over_mean = |layer: usize| {
        let loads = rows.loads(layer);
        let mean = mean(&loads);
        // A layer without activations counts as balanced; an expert without activations is drawn at the end of the
        // scale.
        let colour = |load: &u64| if mean > 0.0 { (*load as f64 / mean).max(0.125).log2() } else { 0.0 };
        loads.iter().map(colour).collect()
    };
    let cells: Vec<Vec<f64>> = (0..rows.layers()).map(over_mean).collect();
    let bottom = TOP + high * rows.layers() as f64;
    let figures = LEFT + wide * rows.experts as f64 + 10.0;
    let mut svg = Svg::new((figures + 130.0).max(520.0), bottom + 60.0);
    let cells = Cells { x: LEFT, y: TOP, wide, high, rows: &cells, scale: Scale::Around(2.0) };
    svg.cells(&cells);
    svg.tips(&cells, |row, column| {
        let (id, loads) = (rows.layer_ids[row], rows.loads(row));
        let mean = mean(&loads).max(1.0);
        let over_mean = |expert: usize| format!("expert {expert} {:.2} x the mean", loads[expert] as f64 / mean);
        match column {
            Some(expert) => format!("layer {id}, {}, {} activations", over_mean(expert), loads[expert]),
            None => format!(
                "layer {id}: busiest is {}",
                over_mean((0..loads.len()).max_by_key(|at| loads[*at]).unwrap_or(0))
            ),
        }
    });
    svg.numbers(LEFT, TOP, wide, rows.experts, "experts");
    svg.text(figures, 12.0, "start", "", "max/mean, entropy");
    for (at, layer) in study.layers.iter().enumerate() {
        let y = TOP + (at as f64 + 0.5) * high + 4.0;
        svg.text(LEFT - 6.0, y, "end", "", &layer.layer_id.to_string());
        svg.text(figures, y, "start", "", &format!("{:.2}, {:.3}", layer.load_max_over_mean, layer.load_entropy));
    }
    svg.layers(LEFT, TOP, bottom, Scale::Around(2.0), "load over the layer's mean", ["1/4 or less", "1", "4 or more"]);
    format!(
        "<p>Activations of each expert. A balanced layer is white and has entropy 1.</p>\n{}",
        svg.finish(&format!("Heat map of expert loads: {} experts in {} layers", rows.experts, rows.layers()))
    )
}

fn mean(loads: &[u64]) -> f64 {
    loads.iter().sum::<u64>() as f64 / loads.len() as f64
}
