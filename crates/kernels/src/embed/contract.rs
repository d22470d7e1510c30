//! What must hold of `embed`.

use super::{Args, launch, reference};
use crate::contract::*;

pub const EMBED: Contract = Contract {
    name: "embed",
    formula: "out[r][i] = table[ids[r]] for every stream i; mix[r] = (1, 0, ...)",
    shapes: "ids [rows], table [vocabulary, columns] bf16, out [rows, streams, columns] f32, mix [rows, streams] f32",
    order: "no sums",
    bound: "exact: bf16 widens to float32 without rounding",
    cases: &[
        Case { name: "streams", rows: 128, sizes: &[("columns", 640), ("streams", 4)] },
        Case { name: "plain", rows: 33, sizes: &[("columns", 96), ("streams", 1)] },
    ],
    make,
    limits: &[],
    controls: &[
        Control::value("reads the row of the token before"),
        Control::value("drops the last column of the last stream"),
        Control::value("starts the mix at the last stream"),
    ],
    edits: &[
        metal("takes the next token's row (Metal)", "ids[row]) * shape.columns", "ids[row] + 1u) * shape.columns"),
        metal("starts the mix at the last stream (Metal)", "copy % shape.streams == 0u", "copy % shape.streams == 3u"),
        metal("writes a row that there isn't", "    if (row >= shape.rows) return;\n", ""),
        Control::crowded(),
    ],
    standard: STANDARD_CONTROLS,
};

/// An edit of this family's Metal source, which gate 1 must notice.
const fn metal(name: &'static str, find: &'static str, replace: &'static str) -> Control {
    Control::metal(name, Gate::Value, include_str!("kernel.metal"), find, replace)
}

/// Rows of the table that only poison picks read: one for each kind.
const POISONED: usize = Pick::POISON_KINDS;
const VOCABULARY: usize = 61;

struct Embedding {
    columns: usize,
    streams: usize,
    table: Vec<u16>,
    ids: Vec<u32>,
}

fn make(case: &Case, seed: u64) -> Box<dyn World> {
    let mut values = Values::new(seed);
    let (columns, streams) = (case.size("columns"), case.size("streams"));
    let poison: Vec<Pick> = (0..POISONED).map(Pick::Poison).collect();
    let mut table: Vec<u16> =
        gather(&poison, &[], columns).iter().map(|value| (value.to_bits() >> 16) as u16).collect();
    table.extend(values.bf16_bits((VOCABULARY - POISONED) * columns, 4.0));
    let ids = (0..case.rows).map(|_| (POISONED + values.below(VOCABULARY - POISONED)) as u32).collect();
    Box::new(Embedding { columns, streams, table, ids })
}

impl World for Embedding {
    fn launch(&self, stage: &mut Stage<'_>, picks: &[Pick], fault: Fault) -> Result<(), String> {
        let before = u32::from(fault.is("reads the row of the token before"));
        let ids: Vec<u32> = picks
            .iter()
            .map(|pick| match *pick {
                Pick::Row(row) => self.ids[row] - before,
                Pick::Poison(kind) => (kind % POISONED) as u32,
            })
            .collect();
        let width = self.streams * self.columns;
        let table = stage.input("table", &self.table);
        let mut out = stage.output::<f32>("out", picks.len() * width);
        let mut mix = stage.output::<f32>("mix", picks.len() * self.streams);
        let args = Args {
            ids: &ids,
            table: &table.buffer,
            columns: self.columns,
            streams: self.streams,
            out: &mut out.buffer,
            mix: Some(&mut mix.buffer),
        };
        stage.run(|queue| launch(queue, args))?;
        for row in 0..picks.len() {
            if fault.is("drops the last column of the last stream") {
                out.edit::<f32>(|out| out[(row + 1) * width - 1] = 0.0);
            }
            if fault.is("starts the mix at the last stream") {
                mix.edit::<f32>(|mix| {
                    mix[row * self.streams..][..self.streams].rotate_left(1);
                    mix[row * self.streams] += 0.5;
                });
            }
        }
        stage.read(table);
        stage.rows::<f32>(out, width);
        stage.rows::<f32>(mix, self.streams);
        Ok(())
    }

    fn expected(&self, row: usize) -> Vec<Expected> {
        let table: Vec<f64> = self.table.iter().map(|bits| f64::from(f32::from_bits(u32::from(*bits) << 16))).collect();
        let mut values = reference::embed(&table, self.columns, &self.ids[row..row + 1], self.streams);
        values.extend((0..self.streams).map(|stream| f64::from(u8::from(stream == 0))));
        values.into_iter().map(Expected::exactly).collect()
    }

    fn work(&self) -> Work {
        let values = self.ids.len() * self.columns;
        Work { bytes: values * (2 + 4 * self.streams), multiply_adds: 0 }
    }
}
