// The order of the site's search results. The pages of FIRST come first if the query has one of their terms.
const FIRST = {
  "03_ddp/README": ["torchrun"],
  "docs/WHAT_GOES_WRONG": ["hang", "out of memory", "oom", "timeout"],
  "submit/README": ["slurm", "pbs", "sbatch", "qsub"],
};

var Scorer = {
  score: ([page, , , , score, , kind]) => {
    const query = new URLSearchParams(location.search).get("q").trim().toLowerCase();
    if (FIRST[page]?.some(term => new RegExp(`\\b${term}`).test(query))) return 100;
    // Of several words, one in any heading would otherwise win
    return kind === "text" && query.includes(" ") ? Math.min(score, Scorer.term) : score;
  },
  // Sphinx's own values
  objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
