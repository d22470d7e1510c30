//! The harness itself: whatever would make a run worthless must fail it. One honest kernel, and records that lie about it.

use tf_contract::controls::{self, Verdict};
use tf_contract::known::Known;
use tf_contract::probe::{Failure, Planted, Probe, Queues, Tally, check};
use tf_contract::report::{Report, Status};
use tf_contract::target::Target;
use tf_contract::{Backend, Options, run};
use tf_kernels::contract::*;
use tf_kernels::families::CONTRACTS;

/// A kernel of the test's own: doubles each row's values.
struct Doubling {
    columns: usize,
    x: Vec<f32>,
    /// Makes gate 1 worthless.
    endless_bound: bool,
}

fn doubling(case: &Case, seed: u64) -> Doubling {
    let columns = case.size("columns");
    Doubling { columns, x: Values::new(seed).floats(case.rows * columns, 1.0), endless_bound: false }
}

impl World for Doubling {
    fn launch(&self, stage: &mut Stage<'_>, picks: &[Pick], fault: Fault) -> Result<(), String> {
        let rows = gather(picks, &self.x, self.columns);
        let x = stage.rows_in("x", &rows);
        let mut out = stage.output::<f32>("out", rows.len());
        for (out, x) in out.buffer.f32_mut().iter_mut().zip(&rows) {
            *out = if fault.is("triples") { 3.0 * x } else { 2.0 * x } + f32::from(u8::from(fault.is("adds one")));
        }
        assert!(!fault.is("panics"), "as planted");
        if fault.is("refuses") {
            return Err("refused".to_owned());
        }
        stage.read(x);
        stage.rows::<f32>(out, self.columns);
        Ok(())
    }

    fn expected(&self, row: usize) -> Vec<Expected> {
        let radius = if self.endless_bound { f64::INFINITY } else { 0.0 };
        let x = wide(&self.x[row * self.columns..][..self.columns]);
        x.iter().map(|x| Expected { value: 2.0 * x, span: Span::around(2.0 * x, radius) }).collect()
    }

    fn work(&self) -> Work {
        Work::default()
    }
}

const HONEST: Contract = Contract {
    name: "doubling",
    formula: "out = 2 x",
    shapes: "x, out [rows, columns] f32",
    order: "no sums",
    bound: "exact",
    cases: &[Case { name: "small", rows: 9, sizes: &[("columns", 8)] }],
    make: |case, seed| Box::new(doubling(case, seed)),
    limits: &[],
    controls: &[Control::value("triples"), Control::value("adds one")],
    edits: &[],
    standard: STANDARD_CONTROLS,
};

fn options() -> Options {
    Options {
        program: "test",
        backend: Backend::Cpu,
        only: "doubling".to_owned(),
        list: false,
        json: None,
        replay: None,
        time: false,
        checkers: false,
        edits: None,
        compile_edits: None,
        launch_only: false,
        seeds: 0,
    }
}

fn report_of(contract: &Contract, known: &[Known]) -> Report {
    run::report(&[contract], &Target::Cpu, &options(), &[], known, &mut |_| {})
}

#[test]
fn an_honest_kernel_passes_and_every_standard_control_is_red() {
    let honest = Contract { controls: const { &[Control::value("triples")] }, ..HONEST };
    let report = report_of(&honest, &[]);
    assert_eq!(report.summary.failed, 0);
    assert_eq!(report.summary.missed, 0, "{:?}", report.kernels[0].controls);
    assert!(!report.holds(), "one own control is too few");
    assert!(report_of(&HONEST, &[]).holds());
    let both =
        Contract { controls: const { &[Control::value("triples"), Control::geometry("nothing planted")] }, ..HONEST };
    let report = report_of(&both, &[]);
    assert_eq!((report.summary.red, report.summary.missed), (STANDARD_CONTROLS.len() + 1, 1));
    assert!(!report.holds(), "a control that is not red");
}

#[test]
fn records_that_prove_nothing_fail_the_run() {
    let endless =
        Contract { make: |case, seed| Box::new(Doubling { endless_bound: true, ..doubling(case, seed) }), ..HONEST };
    let report = report_of(&endless, &[]);
    assert!(report.kernels[0].gates[0].failure.contains("not finite"), "{}", report.kernels[0].gates[0].failure);
    assert!(!report.holds());

    let caseless = Contract { cases: &[], ..HONEST };
    let report = report_of(&caseless, &[]);
    assert!(report.kernels[0].gates.iter().all(|gate| gate.status == Status::Fail));
    assert!(!report.holds());

    let rowless = Contract { cases: &[Case { name: "no rows", rows: 0, sizes: &[("columns", 8)] }], ..HONEST };
    assert!(!report_of(&rowless, &[]).holds());

    let uncontrolled = Contract { controls: &[], standard: &[], ..HONEST };
    assert!(!report_of(&uncontrolled, &[]).holds());

    let twice = Contract { controls: const { &[Control::value("triples"), Control::value("triples")] }, ..HONEST };
    assert!(controls::complaints(&twice).iter().any(|text| text.contains("two controls called")));
}

#[test]
fn a_control_must_be_caught_by_its_gate_and_not_by_breaking() {
    let case = &HONEST.cases[..1];
    let verdict = |control: Control| controls::run_on(&HONEST, case, &control, 1, &mut Queues::default());
    assert!(matches!(verdict(Control::value("triples")), Verdict::Red { .. }));
    // Every row is tripled alike, so the launch does not matter: only gate 1 may call it red.
    assert!(matches!(verdict(Control::geometry("triples")), Verdict::Missed(_)));
    assert!(matches!(verdict(Control::value("panics")), Verdict::Missed(text) if text.contains("as planted")));
    assert!(matches!(verdict(Control::value("refuses")), Verdict::Missed(text) if text.contains("refused")));
    assert!(matches!(verdict(Control::value("unknown")), Verdict::Missed(_)));
}

#[test]
fn a_known_finding_is_counted_and_may_not_outlive_its_defect() {
    let tripled = Contract {
        make: |case, seed| {
            let mut world = doubling(case, seed);
            world.x[3] = f32::NAN;
            Box::new(world)
        },
        ..HONEST
    };
    let known = [Known { id: "K1", kernel: "doubling", gate: Gate::Value, case: "small", reason: "test", issue: 1 }];
    let report = report_of(&tripled, &known);
    assert_eq!(report.summary.known_findings, 1);
    assert_eq!(report.summary.failed, 0);
    let report = report_of(&HONEST, &known);
    assert!(report.complaints.iter().any(|text| text.contains("K1 no longer shows")));
    assert!(!report.holds());
}

#[test]
fn limits_are_tried_on_both_sides() {
    let limited = |accepts| {
        let limit: &'static [Limit] = Box::leak(Box::new([Limit { what: "columns", most: 8, accepts, beyond: 9 }]));
        let contract = Contract { limits: limit, ..HONEST };
        tf_contract::limits::launcher_problems(&contract)
    };
    assert!(limited(|columns| columns <= 8).is_empty());
    assert_eq!(limited(|_| true).len(), 1);
    assert_eq!(limited(|_| false).len(), 1);
    assert_eq!(limited(|columns| columns > 8).len(), 2);
}

#[test]
fn only_names_what_there_is() {
    let names =
        |only: &str| run::choose(CONTRACTS, only).map(|chosen| chosen.iter().map(|c| c.name).collect::<Vec<_>>());
    assert_eq!(names("dsv41").unwrap().len(), CONTRACTS.len());
    assert_eq!(names("kv_store").unwrap(), ["kv_store", "kv_store/ring"]);
    assert_eq!(names("kv_store/ring").unwrap(), ["kv_store/ring"]);
    assert_eq!(names("top_k, kv_store/ring,top_k").unwrap(), ["top_k", "kv_store/ring"]);
    for only in ["", "kv", "kv_store/none", "top_k,nothing"] {
        assert!(names(only).is_err(), "{only:?}");
    }
    for (backend, status) in [(Backend::Cuda, 2), (Backend::Metal, 2)] {
        assert_eq!(tf_contract::execute(&Options { backend, ..options() }), status, "nothing is registered there");
    }
    assert_eq!(tf_contract::execute(&Options { only: "nothing".to_owned(), ..options() }), 2);
    // With --list nothing would run anyway; without the refusal that is a success.
    let timed = |backend| Options { backend, time: true, list: true, only: "dsv41".to_owned(), ..options() };
    assert_eq!(tf_contract::execute(&timed(Backend::Cpu)), 0);
    assert_eq!(tf_contract::execute(&timed(Backend::Metal)), 2, "only the CPU's kernels are timed");
}

#[test]
fn a_launch_that_compares_nothing_is_no_pass() {
    struct Silent;
    impl World for Silent {
        fn launch(&self, _stage: &mut Stage<'_>, _picks: &[Pick], _fault: Fault) -> Result<(), String> {
            Ok(())
        }
        fn expected(&self, _row: usize) -> Vec<Expected> {
            Vec::new()
        }
        fn work(&self) -> Work {
            Work::default()
        }
    }
    for gate in Gate::ALL {
        let mut queues = Queues::default();
        let mut probe = Probe {
            kernel: "doubling",
            world: &Silent,
            queues: &mut queues,
            planted: Planted::NONE,
            row_count: 4,
            tally: Tally::default(),
        };
        assert!(matches!(check(gate, &mut probe), Err(Failure::Broken(_))), "{}", gate.name());
    }
}

/// `docs/reference/kernels.md` is what the registry says.
#[test]
fn generated_page_kernels() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/kernels.md");
    let page = tf_contract::page::kernels(CONTRACTS);
    if std::env::var_os("TENSORFOLD_GENERATE").is_some() {
        std::fs::write(path, &page).expect("the page can be written");
    }
    let found = std::fs::read_to_string(path).unwrap_or_default();
    assert_eq!(found, page, "docs/reference/kernels.md is stale: cargo xtask gen rewrites it");
}

#[test]
fn every_registered_kernel_is_described_and_can_be_found() {
    for contract in CONTRACTS {
        for text in [contract.formula, contract.shapes, contract.order, contract.bound] {
            assert!(!text.is_empty(), "{}", contract.name);
        }
        assert_eq!(controls::complaints(contract), Vec::<String>::new());
        let most = contract.cases.iter().map(|case| case.rows).max().unwrap_or(0);
        let whole_sequences = ["draft_head", "attention/block"].contains(&contract.name);
        assert!(most >= 128 || whole_sequences, "{}: gate 2 needs 128 rows", contract.name);
    }
}
