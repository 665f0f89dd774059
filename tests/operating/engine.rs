//! An engine that is started as the document says, and restarted at its address.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};

use semmoe_mock_engine::{Dialect, Engine, Mock};

use crate::support::Ranks;

/// The engine that stands in for the document's.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Kind {
    /// A mock that answers like recorded engines.
    Mock(Dialect),
    /// Rank processes of the bundled model.
    Ranks,
}

enum Running {
    Mock(Mock),
    Ranks(Ranks),
}

/// An engine behind one address.
pub(crate) struct Fleet {
    pub(crate) kind: Kind,
    pub(crate) address: SocketAddr,
    running: Option<Running>,
    /// The number reported at its first start.
    ranks: u16,
}

impl Fleet {
    pub(crate) fn new(kind: Kind) -> Self {
        // Reserves the address while no engine is running.
        let address = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address");
        Self { kind, address, running: None, ranks: 1 }
    }

    /// Stops the engine. Rank processes must exit with code 0.
    pub(crate) fn stop(&mut self) {
        if let Some(Running::Ranks(ranks)) = self.running.take() {
            ranks.stop();
        }
    }

    /// Stops the engine and starts another with these arguments. `model` is its checkpoint's folder, and `placed` the
    /// tables that its expert map was exported from.
    pub(crate) fn start(&mut self, arguments: &[String], model: &Path, placed: PathBuf) {
        // The old process must have exited before the new one listens.
        self.stop();
        let after = |name: &str| arguments.iter().position(|word| word == name).and_then(|at| arguments.get(at + 1));
        let ranks = ["--attn-dp-size", "--dp-size", "--data-parallel-size"].into_iter().find_map(after);
        let ranks = ranks.map(|count| count.parse().expect("a number"));
        self.ranks = ranks.unwrap_or(self.ranks);
        self.running = Some(match self.kind {
            Kind::Mock(dialect) => Running::Mock(self.mock(dialect, arguments, model)),
            Kind::Ranks => {
                let tables = after("--init-expert-location").map(|_| placed);
                Running::Ranks(Ranks::start_at(self.address, model, self.ranks, tables.as_deref()))
            }
        });
    }

    fn mock(&self, dialect: Dialect, arguments: &[String], model: &Path) -> Mock {
        let after = |name: &str| arguments.iter().position(|word| word == name).and_then(|at| arguments.get(at + 1));
        let named = after("--served-model-name").map_or("Qwen/Qwen3-30B-A3B", String::as_str);
        let engine = Engine::of(dialect, named, model).expect("a checkpoint").with(|settings| {
            settings.ranks = self.ranks;
            settings.gives_routes = arguments.iter().any(|word| word == "--enable-return-routed-experts");
            if let Some(location) = after("--init-expert-location") {
                location.clone_into(&mut settings.init_expert_location);
            }
        });
        Mock::start_at(self.address, engine)
    }

    /// Sets whether a mock's requests last until the loads have been queried.
    pub(crate) fn linger(&self, linger: bool) {
        if let Some(Running::Mock(mock)) = &self.running {
            mock.settings().lingers = linger;
        }
    }
}
