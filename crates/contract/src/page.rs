//! The generated page `docs/reference/kernels.md`: every kernel as its record describes it.

use std::fmt::Write;
use tf_kernels::contract::Contract;

/// The page's text.
pub fn kernels(contracts: &[Contract]) -> String {
    let mut page = HEAD.to_owned();
    let edits: usize = contracts.iter().map(|contract| contract.edits.len()).sum();
    let controls: usize = contracts.iter().map(|contract| contract.all_controls().count()).sum::<usize>() - edits;
    let _ = write!(
        page,
        "\n{} kernels, {controls} controls, {edits} edits of GPU sources.\n\n| kernel | computes |\n| --- | --- |\n",
        contracts.len()
    );
    for contract in contracts {
        let anchor = contract.name.replace('/', "");
        let _ = writeln!(page, "| [{}](#{anchor}) | `{}` |", contract.name, cell(contract.formula));
    }
    for contract in contracts {
        let _ = write!(page, "\n## {}\n\n", contract.name);
        let _ = writeln!(page, "- Computes: `{}`", contract.formula);
        let _ = writeln!(page, "- Shapes: {}", contract.shapes);
        let _ = writeln!(page, "- Order: {}", contract.order);
        let _ = writeln!(page, "- Bound: {}", contract.bound);
        for case in contract.cases {
            let sizes: Vec<String> = case.sizes.iter().map(|(name, size)| format!("{name} {size}")).collect();
            let _ = writeln!(page, "- Case `{}`: {} rows, {}", case.name, case.rows, sizes.join(", "));
        }
        for limit in contract.limits {
            let _ = writeln!(page, "- Limit: {}, {} is taken and {} refused", limit.what, limit.most, limit.beyond);
        }
        let own: Vec<String> =
            contract.controls.iter().map(|control| format!("{} ({})", control.name, control.gate.name())).collect();
        let _ = writeln!(page, "- Controls: {}", own.join("; "));
        let edits: Vec<&str> = contract.edits.iter().map(|control| control.name).collect();
        if !edits.is_empty() {
            let _ = writeln!(page, "- Edits of its sources: {}", edits.join("; "));
        }
    }
    page
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

const HEAD: &str = "\
# Kernels

Generated from the registry; `cargo xtask gen` rewrites this page.

Each kernel is proved by `tf-kernel-contract` (or `tensorfold contract`) through four gates: **value** (every element inside
an interval derived from float64), **geometry** (a row's bits do not depend on the launch: 1 to 128 rows, their order, slots,
neighbours, threads, instruction sets), **memory** (it touches only what it owns and writes all it promises) and **repeat**
(history does not matter). Every gate is shown to be able to fail by controls: planted defects that must turn it red. Beside
the controls named here every kernel carries the standard ones: the last bit follows the row count or the thread count, a
row takes in its neighbour times zero, a byte is written in front of or behind the output, the last element is left out, an
input is written, what the output held is added, the result follows the number of launches before. Edits of a source run
where that source does. Controls of the **limits** show that a launch which asks for more than a chip takes is counted as a
limit problem, also where it fails for that reason.

U is the unit roundoff of float32, 2^-24. Sizes are elements; activations are float32 buffers holding bf16 values wherever
the release rounds to bf16.
";
