# One page over everything.
rule report_page:
    input:
        expand(RUN.stages / "{stage}" / "accepted.json", stage=STAGES),
        RUN.agents / "accepted.json",
        RUN.consistency / "accepted.json",
    output:
        report(
            RUN.report,
            caption="../report/index.rst",
            category="0 Overview",
            labels={"result": "whole run"},
        ),
    params:
        run=RUN.root,
    log:
        LOGS / "report.log",
    conda:
        "../envs/shakedown.yaml"
    localrule: True
    shell:
        "shakedown report {params.run} 2>&1 | tee {log}"
